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
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs
import torch
from torch import nn

from trencadis.errors import ModelLoadError
from trencadis.faults import as_words
from trencadis_torch.attention.adapter import PAGED, switch
from trencadis_torch.attention.kernel import PagedKernel
from trencadis_torch.attention.native import NativeAttention
from trencadis_torch.cache.kv_cache import AttentionLayer
from trencadis_torch.linear import packed
from trencadis_torch.linear.decoder import attach, read_decoder
from trencadis_torch.linear.fused import FusedKernels, FusedNorm, GatedMLP, RotaryAttention
from trencadis_torch.linear.native import ACTIVATIONS, Native
from trencadis_torch.linear.native_decoder import native_decoder
from trencadis_torch.linear.packed import FusedLinear, PackedLinear, RowsEmbedding, held_of
from trencadis_torch.linear.watch import HANDED, Reads, Watched, watch
from trencadis_torch.loading.self_check import paged_logits
from trencadis_torch.parallel.modules import RowLinear, VocabEmbedding

__all__ = ["Replacement", "fuse_decoder", "fuse_modules", "replace_modules"]

logger = logging.getLogger("trencadis.torch")

TOLERANCE: Final = 1e-4
"""Largest difference between a module and its replacement, over the largest value; float32 sums in another order give 1e-6."""

ROUNDINGS: Final = 4
"""The same in 16 bits, in units of their precision: transformers rounds after each operation, a fused module once."""

_FAMILIES: Final = r"(Llama|Mistral|Mixtral|Ministral|Qwen2|Qwen2Moe|Qwen3|Qwen3Moe|Gemma|Gemma2|Gemma3)"
_NORM: Final = re.compile(f"({_FAMILIES}|Phi3)RMSNorm")
_MLP: Final = re.compile(_FAMILIES + "MLP")
_ATTENTION: Final = re.compile(_FAMILIES + "Attention")
_SHAPE: Final = frozenset({"in_features", "out_features"})
"""Attributes of a linear layer that a packed one has as well."""

_QKV: Final = ("q_proj", "k_proj", "v_proj")
_TENSORS: Final = ("query", "key", "value")

Pack = Callable[[list[nn.Linear]], nn.Module]

Together = Callable[[bool], bool]
"""Whether something holds on every rank; with one rank, whether it holds."""


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
        model: Of transformers. Its attention is switched to one that is of no use: another one must be switched on afterwards.
        quantization: What weights are rounded to: ``none``, ``int8`` or ``int4``; the latter two need ``native``.
        native: The compiled library; None: linear layers go to oneDNN one by one, and nothing is fused.
        together: Asked for each module that sums over ranks: all replace it or none, so that all go on with the same sums.
    """
    together = together or bool
    pack = _packer(quantization, native)
    num_linears = sum(type(part) is nn.Linear for part in model.modules())
    num_fused = 0
    seen, reads = _watch(model)
    if native is not None:
        for name in [name for name, _ in _candidates(model)]:
            num_fused += _replace(model, name, seen.pop(name, None), reads, pack, native, together)
    kept = _replace_linears(model, reads, pack)
    replacement = Replacement(
        kernels="onednn" if native is None else f"{'packed' if quantization == 'none' else quantization}{native.panel}",
        weights_bytes=_weights_bytes(model),
        num_linears=num_linears - len(kept),
        num_fused=num_fused,
    )
    logger.info(
        "%s: %d linear layers packed, %d modules fused.", replacement.kernels, num_linears - len(kept), num_fused
    )
    if kept:
        logger.info(
            "%d linear layers stay as they are: the model's code reads what a packed layer does not have (%s: %s).",
            len(kept),
            kept[0],
            ", ".join(sorted(reads[kept[0]])),
        )
    return replacement


@torch.no_grad()
def fuse_modules(model: Any, *, kernels: FusedKernels, together: Together | None = None) -> Replacement:
    """Replace norms, gated MLPs and rotary attentions of a decoder in place, any dtype; linear layers stay PyTorch's.

    Args:
        model: Of transformers. Its attention is switched to one that is of no use: another one must be switched on afterwards.
        kernels: Of the model's device.
        together: As in :func:`replace_modules`.
    """
    (seen, reads), num_fused = _watch(model), 0
    for name in [name for name, _ in _candidates(model)]:
        num_fused += _replace(model, name, seen.pop(name, None), reads, _merged, kernels, together or bool)
    logger.info("%d modules fused.", num_fused)
    return Replacement(kernels="fused", weights_bytes=_weights_bytes(model), num_linears=0, num_fused=num_fused)


def _merged(layers: list[nn.Linear]) -> nn.Linear:
    """Return one linear layer in place of several that have the same input: their outputs stand side by side."""
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
        model: Its modules are replaced. The paged attention is switched on afterwards.
        layers: Its attention layers, as the model computes them.
        kernel: That attends over the cache; if it is not the compiled one, nothing is fused.
        native: The library of its linear layers; None: the same.
    """
    library = native_decoder() if isinstance(kernel, NativeAttention) and native is not None else None
    if native is None or library is None or not switch(model, PAGED):
        return False
    decoder = read_decoder(model, library, panel=native.panel)
    if decoder is None:
        return False
    tokens = [torch.arange(n) * 7 % 131 % decoder.vocab_size for n in (12, 6)]
    expected = paged_logits(model, layers, tokens, "ragged", kernel)
    attach(model, decoder)
    try:
        found = paged_logits(model, layers, tokens, "ragged", kernel)
        fault = "it computes something else"
        if all(_agree(one, other) for one, other in zip(found, expected, strict=True)):
            fault = ""
    except Exception as error:
        fault = f"it fails: {as_words(error)}"
    if fault:
        logger.warning("%s runs layer by layer: in one call %s.", type(model).__name__, fault)
        attach(model, None)
        return False
    logger.info("%s runs in one call.", type(model).__name__)
    return True


def _packer(quantization: str, native: Native | None) -> Pack:
    return lambda layers: packed.pack(
        [held_of(layer, quantization) for layer in layers], [layer.bias for layer in layers], native
    )


def _candidates(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules of known families, parents before their children."""
    found = [(name, type(part).__name__, part) for name, part in model.named_modules()]
    for pattern in (_ATTENTION, _MLP, _NORM):
        yield from ((name, part) for name, kind, part in found if pattern.fullmatch(kind))


def _watch(model: Any) -> tuple[dict[str, Watched], Reads]:
    """Run a few tokens through the model; the calls of its known modules, and what its code reads of all that may be replaced."""
    called = dict(_candidates(model))
    embedding = model.get_input_embeddings()
    linears = {name: part for name, part in model.named_modules() if type(part) is nn.Linear or part is embedding}
    try:
        return watch(model, called, called | linears)
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
    native: FusedKernels,
    together: Together,
) -> bool:
    """Replace a module if something may stand for it; nothing holds the old one afterwards."""
    parent, _, child = name.rpartition(".")
    old = getattr(model.get_submodule(parent), child, None) if _has(model, parent) else None
    if seen is None or old is None:
        return False  # a part of what was replaced before
    if name in reads:
        logger.info("%s is left as it is: the model's code reads %s of it.", name, ", ".join(sorted(reads[name])))
        return False
    new = _replacement(old, seen, pack, native, together)
    if new is not None:
        _put(model, name, new)
    return new is not None


def _has(model: Any, name: str) -> bool:
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True


def _replacement(module: Any, seen: Watched, pack: Pack, native: FusedKernels, together: Together) -> nn.Module | None:
    """Return the replacement of a module, its weights packed; None: there is none."""
    kind = type(module).__name__
    try:
        if _NORM.fullmatch(kind):
            return _norm(module, seen, native)
        if _MLP.fullmatch(kind):
            return _mlp(module, seen, pack, native, together)
        return _rotary_attention(module, seen, pack, native, together)
    except (AttributeError, TypeError, KeyError, RuntimeError) as error:
        # Of a known name, but not made as its family is.
        logger.info("%s is left as it is: %s: %s", kind, type(error).__name__, error)
        return None


def _norm(module: Any, seen: Watched, native: FusedKernels) -> FusedNorm | None:
    """Return a norm by the module's weight or, as Gemma has it, by one more than that; None: it is neither."""
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    for weight in (module.weight, 1.0 + module.weight):
        new = FusedNorm(weight.detach().clone(), float(eps), native)
        if _agree(new(*seen.args), seen.output):
            return new
    return None


def _mlp(module: Any, seen: Watched, pack: Pack, native: FusedKernels, together: Together) -> GatedMLP | None:
    layers, down = [module.gate_proj, module.up_proj], module.down_proj
    names = {name for name, part in module.named_children() if list(part.parameters())}
    activation = ACTIVATIONS.get(_activation_name(module))
    if activation is None or names != {"gate_proj", "up_proj", "down_proj"} or not _are_linear(*layers, down):
        return None
    if not together(_agree(GatedMLP(_Beside(layers), down, activation, native)(*seen.args), seen.output)):
        return None
    return GatedMLP(pack(layers), _pack_last(down, pack), activation, native)


def _activation_name(module: Any) -> str:
    config = module.config
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def _rotary_attention(
    module: Any, seen: Watched, pack: Pack, native: FusedKernels, together: Together
) -> RotaryAttention | None:
    layers = [getattr(module, name) for name in _QKV]
    names = {name for name, part in module.named_children() if list(part.parameters())}
    if names - {"q_norm", "k_norm"} != {*_QKV, "o_proj"} or not _are_linear(*layers, module.o_proj):
        return None
    handed = {name: value for name, value in seen.handed.items() if name not in _TENSORS}
    passed = set(seen.options) | {HANDED}
    common: dict[str, Any] = {
        "original": module,
        "options": {name: value for name, value in handed.items() if name not in passed},
        "unused": frozenset(seen.options.keys() - seen.handed.keys() - {HANDED}),
        "eps": float(_eps_of(getattr(module, "q_norm", None))),
        "native": native,
    }
    if any(isinstance(value, torch.Tensor) for value in common["options"].values()):
        return None
    for norms in _norms_of(module):
        candidate = RotaryAttention(_Beside(layers), module.o_proj, norms=norms, **common)
        if together(_attends_alike(candidate, seen, handed)):
            return RotaryAttention(pack(layers), _pack_last(module.o_proj, pack), norms=norms, **common)
    return None


def _eps_of(norm: Any) -> float:
    if norm is None:
        return 0.0
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def _norms_of(module: Any) -> list[tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Return candidates for the weights of the norms of queries and keys."""
    found = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    if found == [None, None]:
        return [(None, None)]
    first, second = (norm.weight.detach() for norm in found if norm is not None)
    return [(first.clone(), second.clone()), (1.0 + first, 1.0 + second)]


def _attends_alike(candidate: RotaryAttention, seen: Watched, handed: dict[str, Any]) -> bool:
    again: dict[str, Any] = {}
    output = candidate(*seen.args, **{**seen.options, HANDED: again})
    return (
        all(_agree(again[name], seen.handed[name]) for name in _TENSORS)
        and again.keys() - set(_TENSORS) == handed.keys()
        and all(again[name] is value or again[name] == value for name, value in handed.items())
        and _agree(output[0], seen.output[0])
    )


class _Beside:
    """Linear layers as they are, their outputs put side by side."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self._layers = layers

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x) for layer in self._layers], dim=-1)


def _are_linear(*layers: Any) -> bool:
    return all(type(layer.local if isinstance(layer, RowLinear) else layer) is nn.Linear for layer in layers)


def _pack_last(layer: Any, pack: Pack) -> nn.Module:
    """Return a layer after which ranks may sum, its weights packed."""
    local: Any = layer.local if isinstance(layer, RowLinear) else layer
    return layer.around(pack([local])) if isinstance(layer, RowLinear) else pack([local])


def _agree(found: Any, expected: Any) -> bool:
    if not isinstance(found, torch.Tensor) or found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    largest = float(expected.abs().max())
    allowed = TOLERANCE if found.dtype is torch.float32 else ROUNDINGS * torch.finfo(found.dtype).eps
    return bool(torch.isfinite(found).all()) and float((found - expected).abs().max()) <= allowed * largest


def _replace_linears(model: Any, reads: Reads, pack: Pack) -> list[str]:
    """Pack the remaining linear layers, the output projection among them, with which embeddings may share their weights.

    Returns:
        Names of those that stay, since others read what a packed one has not.
    """
    kept = []
    embedding = model.get_input_embeddings()
    embedding = embedding.local if isinstance(embedding, VocabEmbedding) else embedding
    names = {id(part): name for name, part in model.named_modules()}
    tied = getattr(embedding, "weight", None)
    scale = _scale_of(embedding)
    for name in [name for name, part in model.named_modules() if type(part) is nn.Linear]:
        if reads.get(name, frozenset()) - _SHAPE:
            kept.append(name)
            continue
        layer = model.get_submodule(name)
        shares = tied is not None and layer.weight.data_ptr() == tied.data_ptr()
        new = pack([layer])
        _put(model, name, new)
        is_read = names[id(embedding)] in reads
        if shares and scale is not None and not is_read and isinstance(new, PackedLinear):
            _put(model, names[id(embedding)], RowsEmbedding(new, scale))
            del embedding.weight
    return kept


def _scale_of(embedding: Any) -> float | None:
    """Return the scale of an embedding's rows; None: it does something else."""
    if not isinstance(embedding, nn.Embedding) or embedding.max_norm is not None:
        return None
    scale = float(getattr(embedding, "scalar_embed_scale", 1.0))
    ids = torch.tensor([0, embedding.num_embeddings - 1])
    return scale if _agree(embedding(ids), embedding.weight[ids] * scale) else None


def _put(model: Any, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _weights_bytes(model: Any) -> int:
    plain: dict[int, int] = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    packed = sum(part.weights_bytes for part in model.modules() if isinstance(part, FusedLinear))
    return sum(plain.values()) + packed
