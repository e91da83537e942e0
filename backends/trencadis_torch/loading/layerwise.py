"""Loads a decoder layer by layer: what is in memory at a time is what has been packed, and one layer.

    skeleton ─▶ one forward of the check's tokens through the original modules
                before a layer: its weights are read from the files, and rounded to the form that is held
                after it:       what it got and gave proves the modules that replace its own; its weights are packed and let go
             ─▶ the packed model, its attention layers, and the logits of its original modules

Linear layers compute with the weights as they are held, dequantised: so rounding hides no error of a replacement.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import attrs
import torch
from torch import nn
from torch.nn import functional

from trencadis.errors import CollectiveError, ModelLoadError
from trencadis.faults import as_words
from trencadis_torch.attention.adapter import switch
from trencadis_torch.cache.kv_cache import AttentionLayer
from trencadis_torch.linear.formats.source import WeightSource
from trencadis_torch.linear.held import FloatWeight, HeldWeight, StackedWeight
from trencadis_torch.linear.holding import AS_STORED, FLOAT32, Holding
from trencadis_torch.linear.mixtures import is_experts
from trencadis_torch.linear.native import Native
from trencadis_torch.linear.packed import pack
from trencadis_torch.linear.replacement import Replacement, Replacing, embedding_of, kernels_of, watched_modules
from trencadis_torch.linear.watch import Watching
from trencadis_torch.loading.inspection import check_takes_positions, in_order, note_layer, vocab_size, window_of
from trencadis_torch.loading.loader import ModelFiles, refuse_missing
from trencadis_torch.loading.named_weights import NamedWeights
from trencadis_torch.loading.self_check import check_sequences
from trencadis_torch.loading.skeleton import skeleton
from trencadis_torch.parallel.modules import GatheredLinear, VocabEmbedding

if TYPE_CHECKING:
    from trencadis_torch.parallel.parts import ShareWeights

__all__ = ["Dividing", "LoadedDecoder", "NotLayerwiseError", "are_equal", "load_layerwise"]

T = TypeVar("T")

logger = logging.getLogger("trencadis.torch")

STREAMED: Final = "trencadis_streamed"
"""Name of the attention function while a decoder is loaded."""

_WINDOW: Final = "trencadis_window"
"""Attribute of a mask that has the window of its function."""

_ROWS_AT_ONCE: Final = 1 << 24
"""Weights of a linear layer that are dequantised at a time."""

_UNPACKED: Final = 1 << 24
"""Weights of the largest matrix that is unpacked once, and not whenever some of its rows are needed."""


class NotLayerwiseError(Exception):
    """A model cannot be loaded layer by layer; says why. transformers has to load it whole."""


class Dividing(Protocol):
    """A rank among others that load the same model; all make the same calls."""

    def prepared(self, prepare: Callable[[], T]) -> T:
        """Return what something returns that every rank does, and none if one cannot."""
        ...

    def cut(self, model: Any, weights: NamedWeights) -> ShareWeights:
        """Make a model this rank's share, in place; returns the share's weights by their names there."""
        ...

    def agree(self, holds: bool) -> bool:
        """Return whether something holds on every rank of the stage."""
        ...

    def agree_everywhere(self, holds: bool) -> bool:
        """Return whether something holds on every rank."""
        ...

    @property
    def layers(self) -> range | None:
        """Layers of this stage; None: all."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class LoadedDecoder:
    """A decoder that was loaded layer by layer.

    Attributes:
        model: Packed, in evaluation mode; its attention has to be switched.
        layers: Attention layers of the model.
        replacement: Record of the replaced modules.
        expected: Logits that its original modules gave, ``[L, V]`` of each sequence of the check.
        num_parameters: Before it was packed.
    """

    model: Any
    layers: tuple[AttentionLayer, ...]
    replacement: Replacement
    expected: list[torch.Tensor]
    num_parameters: int


@torch.no_grad()
def load_layerwise(
    files: ModelFiles,
    source: WeightSource,
    *,
    holding: Holding,
    native: Native | None,
    prepare: Callable[[Any], None],
    share: Dividing | None = None,
) -> LoadedDecoder:
    """Return a decoder on the CPU, or a rank's share of one, its linear layers packed and its known modules fused.

    Args:
        files: The model.
        source: Weights of the checkpoint.
        holding: The form in which matrices are held.
        native: The compiled library; None: linear layers go to oneDNN one by one, and nothing is fused.
        prepare: Called with the model before any weight is read.
        share: This rank, of several; None: there is one.

    Raises:
        NotLayerwiseError: The model's code does something that needs the whole model; on every rank, if on one.
        ModelLoadError: Weights are missing, or the architecture cannot be served; the message names which.
    """
    begin = functools.partial(_begin, files, source, prepare, share)
    model, weights, num_parameters = begin() if share is None else share.prepared(begin)
    sequences = check_sequences(model, num_parameters)
    loading = _Loading(model, weights, path=files.source.path, holding=holding, native=native, share=share)
    logits, layers = loading.run(torch.stack([sequences[0], _as_long(model, sequences)]))
    return LoadedDecoder(
        model=model,
        layers=layers,
        replacement=loading.result(),
        expected=[one[: len(tokens)] for one, tokens in zip(logits, sequences, strict=True)],
        num_parameters=num_parameters,
    )


def _begin(
    files: ModelFiles, source: WeightSource, prepare: Callable[[Any], None], share: Dividing | None
) -> tuple[Any, NamedWeights | ShareWeights, int]:
    """Return a decoder without its weights, or a rank's share of one, what it is filled with, and the parameters of all ranks."""
    model = skeleton(attrs.evolve(files, config=copy.deepcopy(files.config))).eval().requires_grad_(False)
    check_takes_positions(model)
    prepare(model)
    if model._can_set_experts_implementation():  # noqa: SLF001 - of transformers: one expert after the other
        model.set_experts_implementation("eager")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    weights = NamedWeights(model, source)
    _untie(model, weights)
    _check_complete(model, weights, files)
    return model, weights if share is None else share.cut(model, weights), num_parameters


def _as_long(model: Any, sequences: list[torch.Tensor]) -> torch.Tensor:
    """Return the second sequence continued to the length of the first: what follows changes nothing of what is before it."""
    more = torch.arange(len(sequences[0]) - len(sequences[1])) % vocab_size(model)
    return torch.cat([sequences[1], more])


def _untie(model: Any, weights: NamedWeights) -> None:
    """Give weights that a configuration ties memory of their own, where the files have both and they differ, as transformers does."""
    for target, origin in dict(getattr(model, "all_tied_weights_keys", None) or {}).items():
        if not (weights.has(target) and weights.has(origin)):
            continue
        one, other = (weights.matrix(name) or _read_matrix(weights, name) for name in (target, origin))
        if are_equal(one, other, weights.let_go):
            continue
        logger.warning(
            "%s and %s are tied by config.json, but differ in the files: they are held one by one.", target, origin
        )
        parent, _, name = target.rpartition(".")
        _set(model.get_submodule(parent), name, nn.Parameter(model.get_parameter(target).clone(), requires_grad=False))
        model.all_tied_weights_keys.pop(target)


def _read_matrix(weights: NamedWeights, name: str) -> HeldWeight:
    found = dict(weights.read([name], lambda _: True))[name]
    assert isinstance(found, HeldWeight), "asked for as a matrix"
    return found


def are_equal(one: HeldWeight, other: HeldWeight, let_go: Callable[[], None]) -> bool:
    """Return whether two matrices have the same values; some rows at a time."""
    if one.shape != other.shape:
        return False
    for mine, its in zip(_some_rows(one), _some_rows(other), strict=True):
        is_equal = torch.equal(mine.dequantised(), its.dequantised())
        let_go()
        if not is_equal:
            return False
    return True


def _some_rows(weight: HeldWeight) -> Iterator[HeldWeight]:
    """Yield a matrix some rows at a time."""
    num_outputs, num_inputs = weight.shape
    step = max(1, _ROWS_AT_ONCE // num_inputs)
    return (weight.rows(slice(first, first + step)) for first in range(0, num_outputs, step))


def _check_complete(model: Any, weights: NamedWeights, files: ModelFiles) -> None:
    """Refuse files that lack weights, or have them in another shape.

    Raises:
        ModelLoadError: They do.
    """
    from transformers.utils.loading_report import LoadStateDictInfo

    aliases: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        aliases.setdefault(id(tensor), []).append(name)
    missing = {name for names in aliases.values() if not any(map(weights.has, names)) for name in names[:1]}
    report = LoadStateDictInfo(
        missing_keys=missing,
        unexpected_keys=set(),
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )
    model._adjust_missing_and_unexpected_keys(report)  # noqa: SLF001 - as from_pretrained does
    if report.missing_keys != missing:
        raise NotLayerwiseError(f"transformers makes up weights such as {min(missing - report.missing_keys)}")
    refuse_missing(files.source.path, sorted(missing | set(weights.of_another_shape())))


@attrs.define(eq=False)
class _Place:
    """One weight of the model, and all modules that have it.

    Attributes:
        names: Names of the weight, by each module.
        owners: The modules, and the weight's name there.
        shape: Shape of the weight.
        is_linear: Each of them is a linear layer, and this is its matrix.
        is_stack: These are the matrices of a layer's experts.
    """

    names: list[str]
    owners: list[tuple[nn.Module, str]]
    shape: torch.Size
    is_linear: bool
    is_stack: bool = False


def _places(model: Any, weights: NamedWeights | ShareWeights) -> dict[str, _Place]:
    """Return the weights that a model has, and its files have to give, by their names."""
    stored = model.state_dict(keep_vars=True)
    places: dict[str, _Place] = {}
    found: dict[int, _Place] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for own, tensor in _own_tensors(module):
            name = f"{prefix}.{own}" if prefix else own
            if name not in stored:
                continue
            place = found.setdefault(id(tensor), _Place([], [], tensor.shape, is_linear=True))
            place.names.append(name)
            place.owners.append((module, own))
            # One output, as of a gate, is not rounded: it would save nothing.
            place.is_linear &= type(module) is nn.Linear and own == "weight" and len(tensor) > 1
            place.is_stack = tensor.dim() == 3 and is_experts(module)
            places[name] = place
    # What stands for another stage's modules has parameters that no file gives.
    return {name: place for name, place in places.items() if any(map(weights.has, place.names))}


def _own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return [*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)]


def _set(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Set a parameter or a buffer of a module, which does not count as a read of it."""
    kind = "_parameters" if isinstance(tensor, nn.Parameter) else "_buffers"
    vars(module)[kind][name] = tensor


def _units(model: Any) -> dict[str, nn.Module]:
    """Return what is filled, used and packed at a time, by the beginning of its names: the modules of lists of modules."""
    units: dict[str, nn.Module] = {}
    for name, part in model.named_modules():
        if isinstance(part, nn.ModuleList) and not any(name.startswith(prefix) for prefix in units):
            units.update({f"{name}.{own}.": child for own, child in part.named_children()})
    return units


class _Loading:
    """Fills a skeleton while a forward goes through it, and packs what the forward has left.

    Args:
        model: The skeleton.
        weights: Weights that the skeleton is filled with.
        path: The model's, for errors.
        holding: The form in which matrices are held.
        native: The compiled library, or None.
        share: This rank, of several; None: there is one.
    """

    def __init__(
        self,
        model: Any,
        weights: NamedWeights | ShareWeights,
        *,
        path: str,
        holding: Holding,
        native: Native | None,
        share: Dividing | None,
    ) -> None:
        self._model = model
        self._weights = weights
        self._path = path
        self._holding = holding
        self._native = native
        self._held: dict[int, HeldWeight] = {}
        self._share = share
        self._obstacle: NotLayerwiseError | None = None
        self._stacks: list[tuple[nn.Module, str]] = []
        self._replacing = Replacing(
            model,
            pack=self._pack,
            hold=holding.hold,
            native=native,
            together=None if share is None else share.agree,
            keep=self._refuse_kept,
        )
        self._places = _places(model, weights)
        self._units = _units(model)
        self._handles: list[Any] = []
        self._attention = _Attention(self._give_up)
        self._embedding: _Place | None = None

    def run(self, ids: torch.Tensor) -> tuple[torch.Tensor, tuple[AttentionLayer, ...]]:
        """Run the forward that fills and packs; returns its float32 logits ``[B, T, V]`` and the attention layers.

        Args:
            ids: Tokens, int64 ``[B, T]``.

        Raises:
            NotLayerwiseError: It fails.
            ModelLoadError: The model cannot be paged, or a weight has another shape.
        """
        model = self._model
        _register()
        if not switch(model, STREAMED):
            raise NotLayerwiseError("it does not take its attention from transformers' AttentionInterface")
        self._embed(ids)
        head = self._head()
        within = {name for name in self._places if name.startswith(tuple(self._units))}
        self._fill(self._places.keys() - within - set(head))
        token = _ATTENTION.set(self._attention)
        try:
            with Watching(*watched_modules(model)) as watching:
                for prefix, unit in self._units.items():
                    self._hook(prefix, unit, watching)
                if head:
                    self._fill_when_called(_head_of(model), head)
                # Of each sequence: kernels want angles of every token, not of those of one sequence.
                positions = torch.arange(ids.shape[1]).repeat(len(ids), 1)
                logits = model(input_ids=ids, position_ids=positions, use_cache=False, trencadis_seen={}).logits.float()
                self._replacing.note(*watching.take(None))
            if self._obstacle is None:
                self._finish()
        except (ModelLoadError, CollectiveError):
            raise
        except NotLayerwiseError as reason:
            self._give_up(reason)
        except Exception as error:  # of the model's code, which may be anybody's
            self._give_up_midway(error)
        finally:
            _ATTENTION.reset(token)
            for handle in self._handles:
                handle.remove()
            self._weights.let_go()
        self._agree()
        own = None if self._share is None else self._share.layers
        return logits, in_order(model, self._attention.layers, own)

    def result(self) -> Replacement:
        """Return what was replaced."""
        form = self._holding.form
        return self._replacing.result(kernels_of(self._native, "none" if form in (AS_STORED, FLOAT32) else form))

    def _give_up(self, reason: NotLayerwiseError) -> None:
        """Give up; among other ranks at the end, since they go through the same forward, and wait for this rank's part of it."""
        if self._share is None:
            raise reason
        self._obstacle = self._obstacle or reason

    def _give_up_midway(self, error: Exception) -> None:
        """Give up where a forward has failed.

        Raises:
            ModelLoadError: Another stage may be waiting for this one's hidden states: there is no other way from here.
        """
        reason = f"a forward through its layers, one after the other, failed: {as_words(error)}"
        if self._share is not None and self._share.layers is not None:
            hint = 'Set [backend.torch] pack = "off": each rank then loads its share as transformers made it.'
            raise ModelLoadError(f"{self._path}: {reason}", hint=hint) from error
        self._give_up(NotLayerwiseError(reason))

    def _agree(self) -> None:
        """Give up if a rank has to.

        Raises:
            NotLayerwiseError: It has.
        """
        if self._share is not None and not self._share.agree_everywhere(self._obstacle is None):
            raise self._obstacle or NotLayerwiseError("another rank cannot load its share layer by layer")

    def _hook(self, prefix: str, unit: nn.Module, watching: Watching) -> None:
        """Have a unit filled before its forward, and packed after it."""

        def before(*_: Any) -> None:
            self._fill([name for name in self._places if name.startswith(prefix)])

        def after(*_: Any) -> None:
            for handle in handles:
                handle.remove()
            self._replacing.note(*watching.take(prefix))
            if self._obstacle is None:
                self._replace(prefix)

        handles = [unit.register_forward_pre_hook(before), unit.register_forward_hook(after)]
        self._handles.extend(handles)

    def _fill_when_called(self, layer: Any, names: list[str]) -> None:
        """Have a linear layer filled when it is called; a hook would come too late to give it another forward."""

        def forward(x: torch.Tensor) -> torch.Tensor:
            self._fill(names)
            out: torch.Tensor = layer.forward(x)
            return out

        layer.forward = forward

    def _replace(self, prefix: str) -> None:
        self._attention.replays = True
        self._replacing.replace(prefix)
        self._attention.replays = False
        self._unstack()
        self._weights.let_go()

    def _finish(self) -> None:
        """Fill what the forward has not come through, and replace what is not in a layer."""
        self._fill(list(self._places))
        embedding = embedding_of(self._model)
        if self._embedding is not None and "weight" in self._replacing.reads_of(embedding):
            raise NotLayerwiseError("its code reads the embeddings' weights")
        self._replace("")
        if self._embedding is not None and embedding is embedding_of(self._model):
            self._hold_embeddings(self._embedding)
        left = [name for name, part in self._model.named_parameters() if part.is_meta]
        if left:
            raise NotLayerwiseError(f"nothing gives {left[0]}")

    def _head(self) -> list[str]:
        """Return the names of the weights of an output projection, which are read when it is called; none: it is in a layer."""
        head = _head_of(self._model)
        owned = [place for place in self._places.values() if any(module is head for module, _ in place.owners)]
        return [next(filter(self._places.__contains__, place.names)) for place in owned if place.is_linear]

    def _embed(self, ids: torch.Tensor) -> None:
        """Give embeddings the rows of the tokens that go through the model; of others the memory is never touched."""
        embedding = embedding_of(self._model)
        place = next((one for one in self._places.values() if (embedding, "weight") in one.owners), None)
        if not isinstance(embedding, nn.Embedding) or place is None:
            return
        matrix = self._weights.matrix(next(filter(self._weights.has, place.names)))
        if matrix is None:
            return
        mine = [name for name, owner in zip(place.names, place.owners, strict=True) if owner == (embedding, "weight")]
        self._embedding = _Place(list(place.names), [(embedding, "weight")], place.shape, is_linear=False)
        others = [owner for owner in place.owners if owner != (embedding, "weight")]
        place.owners[:] = others
        for name in place.names if not others else mine:
            self._places.pop(name, None)
        place.is_linear = bool(others) and all(type(one) is nn.Linear for one, _ in others)
        tokens = self._model.get_input_embeddings()
        own = tokens.rows(ids)[0] if isinstance(tokens, VocabEmbedding) else ids
        rows = torch.unique(torch.cat([own.flatten(), torch.tensor([0, place.shape[0] - 1])]))
        held = matrix.rows(rows)
        weight = torch.empty(place.shape)
        weight[rows] = (self._holding.hold(held) if place.is_linear else self._holding.embed(held)).dequantised()
        _set(embedding, "weight", nn.Parameter(weight, requires_grad=False))

    def _hold_embeddings(self, place: _Place) -> None:
        """Hold embeddings of their own, which are not rounded to integers: packed where they are narrower than float32."""
        held = self._weights.matrix(next(filter(self._weights.has, place.names)))
        assert held is not None, "rows of it were read"
        held = self._holding.embed(held)
        is_narrow = self._holding.form != FLOAT32 and self._native is not None and held.form != FLOAT32
        if not is_narrow or not self._replacing.embed_by_rows(lambda: pack([held], [None], self._native)):
            _give(place, held.dequantised())

    def _fill(self, names: Iterable[str]) -> None:
        """Read weights, and give them to the modules that have them."""
        wanted: dict[str, _Place] = {}
        for place in {id(place): place for name in names if (place := self._places.get(name)) is not None}.values():
            wanted[next(filter(self._weights.has, place.names))] = place

        def place_of(name: str) -> _Place | None:
            return wanted.get(name) or self._places.get(name)

        def is_matrix(name: str) -> bool:
            found = place_of(name)
            return found is not None and found.is_linear

        def is_stack(name: str) -> bool:
            found = place_of(name)
            return found is not None and found.is_stack and self._native is not None

        for name, weight in self._weights.read(wanted, is_matrix, is_stack):
            place = place_of(name)
            if place is None:
                continue  # made together with another, and given before
            refuse_missing(self._path, [] if tuple(weight.shape) == tuple(place.shape) else [name])
            for one in place.names:
                self._places.pop(one, None)
            if isinstance(weight, HeldWeight):
                self._hold(place, self._holding.hold(weight))
            elif isinstance(weight, StackedWeight):
                self._stack(place, weight)
            else:
                _give(place, weight)

    def _hold(self, place: _Place, weight: HeldWeight) -> None:
        """Let linear layers compute with a weight as it is held; they have no other. A small one is unpacked once for all."""
        if weight.shape[0] * weight.shape[1] <= _UNPACKED:
            weight = weight.unpacked()
        for module, _ in place.owners:
            assert isinstance(module, nn.Linear), "a place of linear layers"
            self._held[id(module)] = weight
            module.forward = functools.partial(_product, weight, module)  # type: ignore[method-assign]

    def _stack(self, place: _Place, weight: StackedWeight) -> None:
        """Let experts compute with their matrices as they are held: one is dequantised when it is used."""
        for module, name in place.owners:
            held = weight.held(self._holding.hold, transposed=bool(vars(module).get("is_transposed")))
            del vars(module)["_parameters"][name]
            setattr(module, name, held)
            self._stacks.append((module, name))

    def _unstack(self) -> None:
        """Give experts that have not been replaced their matrices as floats."""
        left = {id(part) for part in self._model.modules()}
        for module, name in self._stacks:
            if id(module) in left:
                held = vars(module).pop(name)
                stacked = torch.stack([held[index] for index in range(held.shape[0])])
                module.register_parameter(name, nn.Parameter(stacked, requires_grad=False))
        self._stacks.clear()

    def _take(self, layer: nn.Linear) -> HeldWeight:
        vars(layer).pop("forward", None)
        return self._held.pop(id(layer)) if id(layer) in self._held else FloatWeight(layer.weight.detach())

    def _pack(self, layers: list[nn.Linear], order: torch.Tensor | None = None) -> nn.Module:
        index = slice(None) if order is None else order
        weights = [self._take(layer) if order is None else self._take(layer).rows(order) for layer in layers]
        return pack(weights, [None if layer.bias is None else layer.bias[index] for layer in layers], self._native)

    def _refuse_kept(self, layer: nn.Linear) -> None:
        """Give up: the model's code has read a weight that was not there, perhaps not only its dtype."""
        shape = list(layer.weight.shape)
        self._give_up(NotLayerwiseError(f"its code reads weights of linear layers, as of one of {shape}"))


def _head_of(model: Any) -> Any:
    """Return the output projection; of several ranks' the part that is here. Pure."""
    head = model.get_output_embeddings()
    return head.local if isinstance(head, GatheredLinear) else head


def _give(place: _Place, tensor: torch.Tensor) -> None:
    """Give modules a weight, a copy: floats in float32."""
    mine = tensor.to(torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)
    parameter = nn.Parameter(mine, requires_grad=False)
    for module, name in place.owners:
        _set(module, name, mine if name in vars(module)["_buffers"] else parameter)


def _product(weight: HeldWeight, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Return what a linear layer gives, ``[..., N]`` from ``[..., K]``; of its weight some rows at a time are dequantised."""
    out = torch.cat([functional.linear(x, part.dequantised()) for part in _some_rows(weight)], dim=-1)
    return out if layer.bias is None else out + layer.bias


class _Attention:
    """The model's own eager attention, and what it was called with.

    Args:
        give_up: Takes the reason why a model cannot be loaded so; may return.

    Attributes:
        layers: The attention layers that were called, by their index.
        replays: Modules are compared with their replacements; nothing is noted.
    """

    def __init__(self, give_up: Callable[[NotLayerwiseError], None]) -> None:
        self._give_up = give_up
        self.layers: dict[int, AttentionLayer] = {}
        self.replays = False
        self._functions: dict[int, Callable[..., Any]] = {}

    def attend(self, module: Any, tensors: tuple[torch.Tensor, ...], mask: Any, options: dict[str, Any]) -> Any:
        """Return what the model's own function does."""
        index = getattr(module, "layer_idx", None)
        if not self.replays:
            window = getattr(mask, _WINDOW, None)
            if mask is not None and window is None:
                self._give_up(NotLayerwiseError(f"{type(module).__name__} changes its mask before attention gets it"))
                window = 0
            note_layer(self.layers, module, *tensors[1:], window=window, options=options)
            self._functions[self._index(index)] = _own_function(type(module))
        return self._functions[self._index(index)](module, *tensors, mask, **options)

    @staticmethod
    def _index(index: Any) -> int:
        return int(index)


def _own_function(kind: type) -> Callable[..., Any]:
    """Return the eager attention of the file that a module's class comes from."""
    for one in kind.__mro__:
        function = getattr(sys.modules.get(one.__module__), "eager_attention_forward", None)
        if function is not None:
            found: Callable[..., Any] = function
            return found
    raise NotLayerwiseError(f"the own attention of {kind.__name__} is not known")


_ATTENTION: ContextVar[_Attention] = ContextVar("trencadis_attention")
"""That of the decoder which is loaded in this thread: transformers' table of functions is the process's."""


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(STREAMED, _attention)
    AttentionMaskInterface.register(STREAMED, _mask)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    trencadis_seen: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Note the arguments of an attention function, and attend as the model does."""
    if trencadis_seen is None:
        raise ModelLoadError(
            f"{type(module).__name__} passes no arguments of forward on to attention, or has no layer_idx."
        )
    trencadis_seen.clear()
    trencadis_seen.update(options, query=query.clone(), key=key.clone(), value=value.clone())
    return _ATTENTION.get().attend(module, (query, key, value), attention_mask, options)


def _mask(*, mask_function: Any, local_size: int | None = None, **options: Any) -> torch.Tensor | None:
    """Return the mask of eager attention, with the window that its function amounts to."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    mask: torch.Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS["eager"](
        mask_function=mask_function, local_size=local_size, **options
    )
    if mask is not None:
        setattr(mask, _WINDOW, window_of(mask_function, local_size or 0))
    return mask
