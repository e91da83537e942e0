"""Readers of modules: what a norm, an MLP or an attention computes, and the fused module that may stand for it.

    which modules    those made of linear layers, or of one small weight, as their kind is
    how they work    candidates, of which one gives what the original gave in one forward (see :mod:`trencadis_torch.linear.watch`)
    the proof        the whole replacement on the original weights gives it as well, and what the original gives to other, larger inputs and
                     at other positions; else the module stays

Names of classes and of their parts say nothing here.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import attrs
import torch
from torch import nn
from torch.nn import functional

from trencadis_torch.linear.fused import FusedKernels, FusedMLP, FusedNorm, RotaryAttention
from trencadis_torch.linear.heads import Heads, How
from trencadis_torch.linear.held import HeldWeight
from trencadis_torch.linear.mixtures import is_experts, is_mixture, packed_experts, read_mixture
from trencadis_torch.linear.native import ACTIVATIONS, Native
from trencadis_torch.linear.scaling import FAR, query_scales
from trencadis_torch.linear.watch import HANDED, Watched
from trencadis_torch.parallel.modules import RowLinear

__all__ = ["TOLERANCE", "Hold", "Pack", "Together", "agree", "candidates", "replacement_of"]

logger = logging.getLogger("trencadis.torch")

TOLERANCE: Final = 1e-4
"""Largest difference between a module and its replacement, over the largest value; float32 sums in another order give 1e-6."""

ROUNDINGS: Final = 4
"""The same in 16 bits, in units of their precision: transformers rounds after each operation, a fused module once."""

LARGER: Final = 30.0
"""How much larger than real ones the inputs are that a float32 module must treat alike as well: a limit that is rarely met shows."""

_TENSORS: Final = ("query", "key", "value")
_ANGLES: Final = "position_embeddings"
_EPS: Final = (1e-5, 1e-6)
"""Values for norms that do not state it."""

_ACTIVATIONS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "silu": functional.silu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
    "relu2": lambda x: functional.relu(x).square(),
    "relu": functional.relu,
}


class Pack(Protocol):
    """Packs linear layers that have the same input: their outputs stand side by side."""

    def __call__(self, layers: list[nn.Linear], order: torch.Tensor | None = None) -> nn.Module:
        """Return the one in their place.

        Args:
            layers: They.
            order: Outputs of a single layer, in the order in which they are given, int64 ``[N]``; None: all as they are.
        """
        ...


Hold = Callable[[HeldWeight], HeldWeight]
"""Gives a matrix of an expert the form in which it is held."""

Together = Callable[[bool], bool]
"""Whether something holds on every rank; with one rank, whether it holds."""


def candidates(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules that may be replaced: all of one kind before the next, parents before their children; norms come last."""
    found = list(model.named_modules())
    for is_kind in (_is_attention, _is_mlp, is_mixture, is_experts, _is_norm):
        yield from ((name, part) for name, part in found if is_kind(part))


def replacement_of(
    module: nn.Module,
    seen: Watched | None,
    pack: Pack,
    hold: Hold | None,
    native: FusedKernels,
    together: Together,
) -> nn.Module | None:
    """Return the replacement of a module, its weights packed; None: there is none, or, of experts, no ``hold``."""
    kind = type(module).__name__
    try:
        if is_mixture(module) or is_experts(module):
            return None if hold is None or not isinstance(native, Native) else _mixture(module, seen, hold, native)
        if seen is None:
            return None
        if _is_norm(module):
            return _norm(module, seen, native)
        if _is_mlp(module):
            return _mlp(module, seen, pack, native, together)
        return _rotary_attention(module, seen, pack, native, together)
    except (AttributeError, TypeError, KeyError, IndexError, RuntimeError, ValueError) as error:
        # Made of the same parts as its kind, but not as its kind is.
        logger.info("%s is left as it is: %s: %s", kind, type(error).__name__, error)
        return None


def _mixture(module: nn.Module, seen: Watched | None, hold: Hold, native: Native) -> nn.Module | None:
    """Return a mixture, or experts, to which no row may have come."""
    if is_experts(module):
        return packed_experts(module, seen, hold, native, agree, _activation_of)
    return None if seen is None else read_mixture(module, seen, hold, native, agree, _activation_of)


def agree(found: Any, expected: Any) -> bool:
    """Return whether a tensor is another one but for rounding, which transformers does after each operation in 16 bits. Pure."""
    if not isinstance(found, torch.Tensor) or found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    largest = float(expected.abs().max())
    allowed = TOLERANCE if found.dtype is torch.float32 else ROUNDINGS * torch.finfo(found.dtype).eps
    return bool(torch.isfinite(found).all()) and float((found - expected).abs().max()) <= allowed * largest


def _parts(module: nn.Module) -> tuple[list[Any], list[Any], list[Any]]:
    """Return children that are linear layers, other children with parameters, and those without."""
    linears: list[Any] = []
    weighted: list[Any] = []
    bare: list[Any] = []
    for child in module.children():
        has_weights = next(child.parameters(), None) is not None
        (linears if _is_linear(child) else weighted if has_weights else bare).append(child)
    return linears, weighted, bare


def _is_linear(layer: Any) -> bool:
    return type(layer.local if isinstance(layer, RowLinear) else layer) is nn.Linear


def _has_own_weights(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _is_attention(module: nn.Module) -> bool:
    linears, weighted, _ = _parts(module)
    norms = all(map(_is_norm, weighted)) and len(weighted) in (0, 2)
    sinks = all(one.dim() == 1 for one in module.parameters(recurse=False))
    return hasattr(module, "layer_idx") and len(linears) in (2, 4) and norms and sinks


def _is_mlp(module: nn.Module) -> bool:
    linears, weighted, bare = _parts(module)
    activates = any(_activation_of(one) for one in bare)
    return len(linears) in (2, 3) and not weighted and activates and not _has_own_weights(module)


def _is_norm(module: nn.Module) -> bool:
    if list(module.children()) or not type(module).__name__.endswith("Norm"):
        return False
    weights = dict(module.named_parameters())
    return weights.keys() <= {"weight", "bias"} and all(one.dim() == 1 for one in weights.values())


def _activation_of(module: nn.Module) -> str | None:
    """Return the name of a module's activation; None: it is none that is known."""
    x = torch.linspace(-6, 6, 121)
    try:
        y = module(x.clone())
    except Exception:  # of a module that takes something else
        return None
    known = (name for name, one in _ACTIVATIONS.items() if isinstance(y, torch.Tensor) and y.shape == x.shape)
    return next((name for name in known if torch.allclose(_ACTIVATIONS[name](x), y.float(), atol=1e-6)), None)


def _norm(module: Any, seen: Watched, native: FusedKernels) -> FusedNorm | None:
    """Return a norm by the module's weight, by one more than that as Gemma has it, or without one; None: it is none of these."""
    known = [getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name)]
    x = seen.args[0]
    more = _larger(x)
    expected = None if more is None else module(more)
    for eps, (weight, bias), centred in itertools.product(known or _EPS, _weights_of(module, x), (False, True)):
        if bias is not None and not centred:
            continue
        new = FusedNorm(weight, float(eps), native, bias=bias, centred=centred)
        if agree(new(x), seen.output) and (expected is None or agree(new(more), expected)):
            return new
    return None


def _weights_of(module: Any, x: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if weight is None:
        return [(x.new_ones(x.shape[-1]), None)]
    bias = None if bias is None else bias.detach().clone()
    return [(weight.detach().clone(), bias), (1.0 + weight.detach(), bias)]


def _larger(x: torch.Tensor) -> torch.Tensor | None:
    """Return other inputs of the same shape, some of them as large as real ones, some larger and some smaller; None in 16 bits."""
    if x.dtype is not torch.float32:
        return None
    made = torch.randn(x.shape, generator=torch.Generator().manual_seed(11)).to(x.device) * x.square().mean().sqrt()
    made[..., ::2, :] *= LARGER
    made[..., 1::4, :] /= LARGER**2
    return made


def _mlp(module: Any, seen: Watched, pack: Pack, native: FusedKernels, together: Together) -> FusedMLP | None:
    linears, _, bare = _parts(module)
    found = [name for name in map(_activation_of, bare) if name is not None]
    for layers, down, gated in _splits(linears):
        new = FusedMLP(_Beside(layers), down, ACTIVATIONS[found[0]], native, gated=gated)
        if not together(_same(new, module, seen)):
            continue
        return FusedMLP(pack(layers), _pack_last(down, pack), ACTIVATIONS[found[0]], native, gated=gated)
    return None


def _splits(linears: Sequence[Any]) -> Iterator[tuple[list[Any], Any, bool]]:
    """Yield what may be gates and values, or values alone, what may go back, and whether there are gates."""
    if len(linears) == 2:
        up, down = linears
        if up.out_features in (_width(down), 2 * _width(down)):
            yield [up], down, up.out_features != _width(down)
        return
    for gate, up, down in ((0, 1, 2), (1, 0, 2)):
        widths = {linears[gate].out_features, linears[up].out_features, _width(linears[down])}
        if len(widths) == 1:
            yield [linears[gate], linears[up]], linears[down], True


def _width(layer: Any) -> int:
    """Return the inputs of a linear layer on this rank."""
    local: Any = layer.local if isinstance(layer, RowLinear) else layer
    return int(local.in_features)


def _same(new: nn.Module, module: nn.Module, seen: Watched) -> bool:
    more = _larger(seen.args[0])
    if not agree(new(*seen.args), seen.output):
        return False
    return more is None or agree(new(more, *seen.args[1:]), module(more, *seen.args[1:]))


def _rotary_attention(
    module: Any, seen: Watched, pack: Pack, native: FusedKernels, together: Together
) -> RotaryAttention | None:
    handed = {name: value for name, value in seen.handed.items() if name not in _TENSORS}
    passed = set(seen.options) | {HANDED}
    common: dict[str, Any] = {
        "original": module,
        "options": {name: value for name, value in handed.items() if name not in passed},
        "unused": frozenset(seen.options.keys() - seen.handed.keys() - {HANDED}),
        "native": native,
    }
    layers, last = _inputs_and_output(module)
    heads, order = None, None
    own = {id(one) for one in module.parameters(recurse=False)}
    if not any(isinstance(value, torch.Tensor) and id(value) not in own for value in common["options"].values()):
        scales = query_scales(module, seen, layers, last) if isinstance(native, Native) else None
        possible = [attrs.evolve(one, scales=scales) for one in _heads(module, seen)]
        tried = ((one, _Beside(layers, order)) for order in _orders(layers, seen) for one in possible)
        found = next((pair for pair in tried if _turns_alike(*pair, seen, native)), None)
        heads, order = (None, None) if found is None else (found[0], found[1].order)
    # Every rank is asked, also if here is nothing to try: what follows sums over them.
    if not together(heads is not None) or heads is None:
        return None
    candidate = RotaryAttention(_Beside(layers, order), last, heads=heads, **common)
    if not together(_attends_alike(candidate, seen, handed)) or not together(
        _attends_anywhere(candidate, module, seen)
    ):
        return None
    return RotaryAttention(pack(layers, order), _pack_last(last, pack), heads=heads, **common)


def _inputs_and_output(module: Any) -> tuple[list[Any], Any]:
    """Return linear layers of queries, keys and values, and the one behind attention: of these, it is defined first or last."""
    linears, _, _ = _parts(module)
    first, last = linears[0], linears[-1]
    if len(linears) == 2 and last.out_features > first.out_features:
        return [last], first
    return linears[:-1], last


def _orders(layers: list[Any], seen: Watched) -> Iterator[torch.Tensor | None]:
    """Yield in which order outputs may be queries, keys and values: as they are, or, of one layer, those of each KV head together."""
    yield None
    query, key = (seen.handed[name] for name in _TENSORS[:2])
    num_groups, left = divmod(query.shape[1], key.shape[1])
    if len(layers) == 1 and not left and key.shape[1] > 1:
        places = torch.arange(layers[0].out_features).view(key.shape[1], num_groups + 2, -1)
        parts = (slice(0, num_groups), slice(num_groups, -1), slice(-1, None))
        yield torch.cat([places[:, part].flatten() for part in parts])


def _heads(module: Any, seen: Watched) -> Iterator[Heads]:
    """Yield the ways in which queries and keys may have been normed and turned."""
    query, key, value = (seen.handed[name] for name in _TENSORS)
    if value.shape != key.shape or query.shape[-1] != key.shape[-1]:
        return
    sizes = {"num_heads": query.shape[1], "num_kv_heads": key.shape[1], "head_dim": query.shape[-1]}
    ways = [(How.HALVES, False, True), (How.PAIRS, False, True), (How.PAIRS, True, True), (How.HALVES, False, False)]
    places = [How.HALVES] if not _head_norms(module) else [How.HALVES, How.NORMS_AFTER, How.NORMS_WHOLE]
    angles = _angles_of(seen)
    if angles is None:
        ways = ways[-1:]
    # Half as many as a head has elements: once for both, or of half of each head.
    onces = (False, True) if angles is not None and 2 * angles[0].shape[-1] <= query.shape[-1] else (False,)
    for (how, spread, turns), place, once in itertools.product(ways, places, onces):
        size = (sizes["num_heads"] * sizes["head_dim"], sizes["num_kv_heads"] * sizes["head_dim"])
        for norms in _head_weights(module, size if place is How.NORMS_WHOLE else (sizes["head_dim"],) * 2, query):
            yield Heads(**sizes, **norms, how=how | place, spread=spread, once=once, turns=turns)


def _angles_of(seen: Watched) -> tuple[torch.Tensor, torch.Tensor] | None:
    found = seen.options.get(_ANGLES)
    given = found if found is not None else next((one for one in seen.args[1:] if isinstance(one, tuple)), None)
    return given if isinstance(given, tuple) and len(given) == 2 else None


def _head_norms(module: Any) -> list[Any]:
    return [child for child in module.children() if _is_norm(child)]


def _head_weights(module: Any, sizes: tuple[int, int], like: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Yield candidates for the norms of queries and keys: by their weights, by one more, or without any."""
    norms = _head_norms(module)
    if not norms:
        yield {}
        return
    if len(norms) != 2 or any(getattr(norm, "bias", None) is not None for norm in norms):
        return
    eps = [getattr(norm, "variance_epsilon", getattr(norm, "eps", None)) for norm in norms]
    weights = [getattr(norm, "weight", None) for norm in norms]
    ones = [like.new_ones(size) for size in sizes]
    found: list[list[torch.Tensor]] = [ones]
    if all(weight is not None for weight in weights):
        plain = [weight.detach() for weight in weights if weight is not None]
        if tuple(map(len, plain)) != sizes:
            return
        found = [[one.clone() for one in plain], [1.0 + one for one in plain]]
    for each in _EPS if eps[0] is None else (eps[0],):
        for query, key in found:
            yield {"query_norm": query, "key_norm": key, "eps": float(each)}


def _turns_alike(heads: Heads, layers: _Beside, seen: Watched, native: FusedKernels) -> bool:
    """Return whether queries, keys and values are those that were handed to attention; without what ranks do together."""
    x = seen.args[0] if seen.args else seen.options["hidden_states"]
    whole: Any = layers(x)
    counts = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    if whole.shape[-1] != sum(counts) * heads.head_dim:
        return False
    angles = _angles_of(seen) if heads.turns else None
    if angles is not None and angles[0].shape[-1] > heads.head_dim:
        return False
    native.rotate(whole, heads, None if angles is None else heads.angles(*angles))
    if heads.scales is not None:
        heads.scale(whole, seen.options["position_ids"])
    parts = whole.unflatten(-1, (-1, heads.head_dim)).transpose(1, 2).split(counts, dim=1)
    return all(agree(part, seen.handed[name]) for part, name in zip(parts, _TENSORS, strict=True))


def _attends_alike(candidate: RotaryAttention, seen: Watched, handed: dict[str, Any]) -> bool:
    again: dict[str, Any] = {}
    output = candidate(*seen.args, **{**seen.options, HANDED: again})
    return (
        all(agree(again[name], seen.handed[name]) for name in _TENSORS)
        and again.keys() - set(_TENSORS) == handed.keys()
        and all(again[name] is value or again[name] == value for name, value in handed.items())
        and agree(output[0], seen.output[0])
    )


def _attends_anywhere(candidate: RotaryAttention, module: nn.Module, seen: Watched) -> bool:
    """Return whether other, larger hidden states at far positions are treated alike too."""
    args, options = list(seen.args), dict(seen.options)
    more = _larger(args[0] if args else options["hidden_states"])
    if more is None:
        return True
    if args:
        args[0] = more
    else:
        options["hidden_states"] = more
    if isinstance(options.get("position_ids"), torch.Tensor):
        options["position_ids"] = options["position_ids"] + FAR  # what it does with positions besides angles shows
    made: list[dict[str, Any]] = [{}, {}]
    outputs = [
        one(*args, **{**options, HANDED: handed})[0] for one, handed in zip((candidate, module), made, strict=True)
    ]
    return agree(*outputs) and all(agree(made[0][name], made[1][name]) for name in _TENSORS)


class _Beside:
    """Linear layers as they are, their outputs put side by side, or in another order."""

    def __init__(self, layers: list[nn.Linear], order: torch.Tensor | None = None) -> None:
        self._layers = layers
        self.order = order

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.cat([layer(x) for layer in self._layers], dim=-1)
        return made if self.order is None else made[..., self.order]


def _pack_last(layer: Any, pack: Pack) -> nn.Module:
    """Return a layer after which ranks may sum, its weights packed."""
    local: Any = layer.local if isinstance(layer, RowLinear) else layer
    return layer.around(pack([local])) if isinstance(layer, RowLinear) else pack([local])
