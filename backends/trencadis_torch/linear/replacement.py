"""Replaces modules of a loaded decoder: packed or int8 linear layers, and fused modules where possible.

    one forward of a few tokens ─▶ what every norm, MLP and attention of a known family got and gave
    a replacement, on the original weights, gets the same: it must give the same, else the module stays
    then its weights are packed, module by module, and the original's are let go

A linear layer alone is replaced wherever it is. Anything else that is unknown is left as it is, and so is a module of which other code
reads what its replacement does not have.

Of a plain decoder whose modules have all been replaced, passes run in one call, after such a call has given what they give.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs
import torch
from torch import nn

from trencadis.errors import ModelLoadError
from trencadis.faults import as_words
from trencadis_torch.attention.adapter import PAGED, switch
from trencadis_torch.attention.native import NativeAttention
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKernel
from trencadis_torch.linear import packed
from trencadis_torch.linear.decoder import attach, how_it_runs, read_decoder
from trencadis_torch.linear.fused import FusedKernels
from trencadis_torch.linear.holding import AS_STORED, BFLOAT16, Holding
from trencadis_torch.linear.native import KINDS, Native
from trencadis_torch.linear.native_decoder import NativeDecoder, native_decoder
from trencadis_torch.linear.packed import FusedLinear, PackedLinear, RowsEmbedding, held_of
from trencadis_torch.linear.readers import Hold, Pack, Together, agree, candidates, replacement_of
from trencadis_torch.linear.structure import OtherwiseError
from trencadis_torch.linear.watch import Reads, Watched, watch
from trencadis_torch.loading.self_check import paged_logits
from trencadis_torch.parallel.modules import VocabEmbedding

__all__ = [
    "Replacement",
    "Replacing",
    "embedding_of",
    "forms_of",
    "fuse_decoder",
    "fuse_modules",
    "kernels_of",
    "put",
    "replace_modules",
    "rounds_rows",
    "rounds_to_bfloat16",
    "watched_modules",
]

logger = logging.getLogger("trencadis.torch")

_SHAPE: Final = frozenset({"in_features", "out_features"})
"""Attributes of a linear layer that a packed one has as well."""


@attrs.frozen(kw_only=True)
class Replacement:
    """Result of :func:`replace_modules`.

    Attributes:
        kernels: Whose low bits its activations have now; empty: the model's own.
        weights_bytes: Memory of all its weights now.
        num_linears: Linear layers replaced, fused ones counted one by one.
        num_fused: Norms, MLPs and attentions replaced.
    """

    kernels: str
    weights_bytes: int
    num_linears: int
    num_fused: int


@torch.no_grad()
def replace_modules(
    model: Any, *, quantization: str = "none", native: Native | None, together: Together | None = None
) -> Replacement:
    """Replace modules of a decoder in place; float32, on the CPU.

    Args:
        model: Model of transformers. Its attention is switched to one that is of no use: another one must be switched on afterwards.
        quantization: Rounding of weights: ``none``, ``int8`` or ``int4``; the latter two need ``native``.
        native: The compiled library; None: linear layers go to oneDNN one by one, and nothing is fused.
        together: Asked for each module that sums over ranks: all replace it or none, so that all go on with the same sums.
    """
    replacing = Replacing(
        model,
        pack=_packer(quantization, native),
        hold=Holding(AS_STORED if quantization == "none" else quantization).hold,
        native=native,
        together=together,
    )
    replacing.note(*_watch(model))
    replacing.replace("")
    return replacing.result(kernels_of(native, quantization))


def kernels_of(native: Native | None, form: str) -> str:
    """Return the name of what computes linear layers, by which low bits of activations are told apart. Pure.

    Args:
        native: The compiled library, or None.
        form: Which weights are rounded to; ``none``: they are not.
    """
    if native is None:
        return "onednn"
    pairs = "tiles" if native.has_tiles else "pairs" if native.dots_pairs else "rounded"
    names = {"none": "packed", BFLOAT16: pairs}
    return f"{names.get(form, form)}{native.panel}"


class Replacing:
    """Replaces modules of a decoder in place, all at once or layer by layer, as they have been watched.

    Args:
        model: Model of transformers.
        pack: Packs linear layers that have the same input.
        hold: Gives a matrix of an expert the form in which it is held; None: experts stay as they are.
        native: The compiled library; None: nothing is fused.
        together: Agreement between ranks; see :func:`replace_modules`.
        keep: Called with each linear layer that stays as it is.
    """

    def __init__(
        self,
        model: Any,
        *,
        pack: Pack,
        hold: Hold | None,
        native: Native | None,
        together: Together | None = None,
        keep: Callable[[nn.Linear], None] = lambda _: None,
    ) -> None:
        self._model = model
        self._pack = pack
        self._hold = hold
        self._native = native
        self._together: Together = together or bool
        self._keep = keep
        self._seen: dict[str, Watched] = {}
        self._reads: dict[str, frozenset[str]] = {}
        self._num_linears = sum(type(part) is nn.Linear for part in model.modules())
        self._num_fused = 0
        self._kept: list[str] = []
        self._shared = _sharing_embeddings(model)
        # Found before anything is replaced: a replacement is no candidate, and is not to be tried as an activation.
        self._candidates = [name for name, _ in candidates(model)]

    def note(self, seen: dict[str, Watched], reads: Reads) -> None:
        """Take what was seen of modules, which may be replaced from now on."""
        self._seen.update(seen)
        self._reads.update(reads)

    def replace(self, prefix: str) -> None:
        """Replace what may be replaced, and was not yet.

        Args:
            prefix: Beginning of the modules' names, with its point; empty: all.
        """
        part = self._model.get_submodule(prefix.rstrip("."))
        if self._native is not None:
            for name in filter(lambda name: name.startswith(prefix), self._candidates):
                seen = self._seen.pop(name, None)
                self._num_fused += _replace(
                    self._model, name, seen, self._reads, self._pack, self._hold, self._native, self._together
                )
        for name in [prefix + name for name, layer in part.named_modules() if type(layer) is nn.Linear]:
            self._replace_linear(name)

    def _replace_linear(self, name: str) -> None:
        """Pack a linear layer, with which embeddings may share their weights, unless others read what a packed one has not."""
        layer = self._model.get_submodule(name)
        if self._reads.get(name, frozenset()) - _SHAPE:
            if name not in self._kept:
                self._kept.append(name)
                self._keep(layer)
            return
        new = self._pack([layer])
        put(self._model, name, new)
        if name != self._shared or not isinstance(new, PackedLinear):
            return
        self.embed_by_rows(lambda: new)

    def embed_by_rows(self, pack: Callable[[], nn.Module]) -> bool:
        """Let embeddings read their rows out of a packed matrix, if they do no more than that; returns whether they do.

        Args:
            pack: Returns the matrix, ``[vocabulary, K]``; not called if they do not.
        """
        embedding = embedding_of(self._model)
        name = next(name for name, part in self._model.named_modules() if part is embedding)
        scale = _scale_of(embedding)
        if scale is None or name in self._reads:
            return False
        matrix = pack()
        if not isinstance(matrix, PackedLinear):
            return False
        put(self._model, name, RowsEmbedding(matrix, scale))
        del embedding.weight
        return True

    def reads_of(self, module: nn.Module) -> frozenset[str]:
        """Return what other code reads of a module of the model."""
        name = next((name for name, part in self._model.named_modules() if part is module), "")
        return self._reads.get(name, frozenset())

    def result(self, kernels: str) -> Replacement:
        """Return what was replaced, and say so in the log.

        Args:
            kernels: Whose low bits activations have.
        """
        replacement = Replacement(
            kernels=kernels,
            weights_bytes=_weights_bytes(self._model),
            num_linears=self._num_linears - len(self._kept),
            num_fused=self._num_fused,
        )
        logger.info(
            "%s: %d linear layers packed, %d modules fused.", kernels, replacement.num_linears, replacement.num_fused
        )
        if self._kept:
            logger.info(
                "%d linear layers stay as they are: the model's code reads what a packed layer does not have (%s: %s).",
                len(self._kept),
                self._kept[0],
                ", ".join(sorted(self._reads[self._kept[0]])),
            )
        return replacement


def embedding_of(model: Any) -> Any:
    """Return the module that embeds tokens on this rank. Pure."""
    embedding = model.get_input_embeddings()
    return embedding.local if isinstance(embedding, VocabEmbedding) else embedding


def _sharing_embeddings(model: Any) -> str:
    """Return the name of the linear layer that shares its weights with the embeddings; empty: there is none."""
    weight = getattr(embedding_of(model), "weight", None)
    if weight is None:
        return ""
    for name, layer in model.named_modules():
        is_same = type(layer) is nn.Linear and (
            layer.weight is weight or (layer.weight.data_ptr() == weight.data_ptr() != 0)
        )
        if is_same:
            return str(name)
    return ""


@torch.no_grad()
def fuse_modules(model: Any, *, kernels: FusedKernels, together: Together | None = None) -> Replacement:
    """Replace norms, gated MLPs and rotary attentions of a decoder in place, any dtype; linear layers stay PyTorch's.

    Args:
        model: Model of transformers. Its attention is switched to one that is of no use: another one must be switched on afterwards.
        kernels: Kernels of the model's device.
        together: Agreement between ranks; see :func:`replace_modules`.
    """
    (seen, reads), num_fused = _watch(model), 0
    for name in [name for name, _ in candidates(model)]:
        num_fused += _replace(model, name, seen.pop(name, None), reads, _merged, None, kernels, together or bool)
    logger.info("%d modules fused.", num_fused)
    return Replacement(kernels="fused", weights_bytes=_weights_bytes(model), num_linears=0, num_fused=num_fused)


def _merged(layers: list[nn.Linear], order: torch.Tensor | None = None) -> nn.Linear:
    """Return one linear layer in place of several that have the same input: their outputs stand side by side."""
    if order is not None:
        (layer,) = layers
        for own in layer.parameters(recurse=False):
            own.data = own.data[order.to(own.device)]
    if len(layers) == 1:
        return layers[0]
    weight = torch.cat([layer.weight for layer in layers])
    has_bias = any(layer.bias is not None for layer in layers)
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=has_bias, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if has_bias:
        biases: list[torch.Tensor] = [
            layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers
        ]
        made.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return made


@torch.inference_mode()
def fuse_decoder(
    model: Any, *, layers: tuple[AttentionLayer, ...], kernel: PagedKernel | None, native: Native | None
) -> bool:
    """Let passes of a plain decoder run in one call, if it gives the logits that its modules give; returns whether it does.

    Args:
        model: Model with replaced modules. The paged attention is switched on afterwards.
        layers: Attention layers, as the model computes them.
        kernel: That attends over the cache; if it is not the compiled one, nothing is fused.
        native: The library of its linear layers; None: the same.
    """
    name, why = type(model).__name__, "its kernels are not compiled here"
    library = native_decoder() if isinstance(kernel, NativeAttention) and native is not None else None
    if native is not None and library is not None:
        why = _fuse(model, native, library, layers, kernel)
    if why:
        attach(model, None, why)
    logger.info("%s runs %s.", name, how_it_runs(model))
    return not why


def _fuse(
    model: Any, native: Native, library: NativeDecoder, layers: tuple[AttentionLayer, ...], kernel: PagedKernel | None
) -> str:
    """Attach the decoder read off a model, if it computes the same; returns in words why it does not."""
    try:
        decoder = read_decoder(model, library, panel=native.panel)
    except OtherwiseError as reason:
        return str(reason)
    finally:
        switched = switch(model, PAGED)
    if not switched:
        return "it does not take its attention from transformers' AttentionInterface"
    tokens = [torch.arange(n) * 7 % 131 % decoder.vocab_size for n in (12, 6)]
    expected = paged_logits(model, layers, tokens, "ragged", kernel)
    attach(model, decoder)
    try:
        found = paged_logits(model, layers, tokens, "ragged", kernel)
    except Exception as error:
        return f"in one call it fails: {as_words(error)}"
    alike = all(agree(one, other) for one, other in zip(found, expected, strict=True))
    return "" if alike else "in one call it computes something else"


def _packer(quantization: str, native: Native | None) -> Pack:
    def pack(layers: list[nn.Linear], order: torch.Tensor | None = None) -> nn.Module:
        index = slice(None) if order is None else order
        weights = [held_of(layer, quantization).rows(index) for layer in layers]
        return packed.pack(weights, [None if layer.bias is None else layer.bias[index] for layer in layers], native)

    return pack


def watched_modules(model: Any) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Return, by name, the modules whose calls are wanted, and those whose reads by others are. Pure."""
    called = dict(candidates(model))
    embedding = model.get_input_embeddings()
    linears = {name: part for name, part in model.named_modules() if type(part) is nn.Linear or part is embedding}
    return called, called | linears


def _watch(model: Any) -> tuple[dict[str, Watched], Reads]:
    """Run a few tokens through the model; the calls of its known modules, and what its code reads of all that may be replaced."""
    try:
        return watch(model, *watched_modules(model))
    except Exception as error:
        name = type(model).__name__
        raise ModelLoadError(
            f"{name}: which of its layers can be packed is not known, for a forward of five tokens failed: {as_words(error)}.",
            hint='[backend.torch] quantization = "none" serves it as transformers made it.',
        ) from error


def _replace(
    model: Any,
    name: str,
    seen: Watched | None,
    reads: Reads,
    pack: Pack,
    hold: Hold | None,
    native: FusedKernels,
    together: Together,
) -> bool:
    """Replace a module if something may stand for it; nothing holds the old one afterwards."""
    parent, _, child = name.rpartition(".")
    old = getattr(model.get_submodule(parent), child, None) if _has(model, parent) else None
    if old is None:
        return False  # a part of what was replaced before
    if name in reads:
        logger.info("%s is left as it is: the model's code reads %s of it.", name, ", ".join(sorted(reads[name])))
        return False
    new = replacement_of(old, seen, pack, hold, native, together)
    if new is not None:
        put(model, name, new)
    return new is not None


def _has(model: Any, name: str) -> bool:
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True


def _scale_of(embedding: Any) -> float | None:
    """Return the scale of an embedding's rows; None: it does something else."""
    if not isinstance(embedding, nn.Embedding) or embedding.max_norm is not None:
        return None
    scale = float(getattr(embedding, "scalar_embed_scale", 1.0))
    ids = torch.tensor([0, embedding.num_embeddings - 1])
    return scale if agree(embedding(ids), embedding.weight[ids] * scale) else None


def put(model: Any, name: str, module: nn.Module) -> None:
    """Put a module in the place of a part of a model."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _weights_bytes(model: Any) -> int:
    plain: dict[int, int] = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    packed = {id(part): part.weights_bytes for part in _packed_parts(model)}
    return sum(plain.values()) + sum(packed.values())


def _packed_parts(model: Any) -> Iterator[FusedLinear]:
    """Yield packed layers, and the matrices that embeddings read rows of, some of them twice."""
    for part in model.modules():
        if isinstance(part, FusedLinear):
            yield part
        elif isinstance(part, RowsEmbedding):
            yield part.head


def rounds_rows(model: Any) -> bool:
    """Return whether a layer of a model rounds its inputs to int8, as those with weights of integers do. Pure.

    Args:
        model: Model of transformers, its modules replaced.
    """
    return any(isinstance(part, PackedLinear) and part.packed.scales is not None for part in _packed_parts(model))


def rounds_to_bfloat16(model: Any) -> bool:
    """Return whether a layer of a model rounds its inputs to bfloat16. Pure.

    Args:
        model: Model of transformers, its modules replaced.
    """
    return any(
        isinstance(part, PackedLinear) and part.packed.kind == KINDS["bfloat_pairs"] for part in _packed_parts(model)
    )


def forms_of(model: Any) -> str:
    """Return the forms in which a model's weights are held, in words, that of the most bytes first. Pure.

    Args:
        model: Model of transformers, its modules replaced.
    """
    sizes: Counter[str] = Counter()
    for part in {id(part): part for part in _packed_parts(model)}.values():
        sizes[part.form] += part.weights_bytes
    for parameter in {id(one): one for one in model.parameters()}.values():
        sizes[str(parameter.dtype).removeprefix("torch.")] += parameter.nbytes
    total = max(1, sizes.total())
    return ", ".join(f"{form} ({100 * size / total:.0f} %)" for form, size in sizes.most_common() if 50 * size > total)
