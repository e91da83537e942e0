"""Readers of modules: what a norm, an MLP or an attention computes, and the fused module that may stand for it.

Each is proven on what the original got and gave in one forward (see :mod:`trencadis_torch.linear.watch`): a replacement on the original
weights gets the same and must give the same, else the module stays.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn

from trencadis_torch.linear.fused import FusedKernels, FusedNorm, GatedMLP, RotaryAttention
from trencadis_torch.linear.native import ACTIVATIONS
from trencadis_torch.linear.watch import HANDED, Watched
from trencadis_torch.parallel.modules import RowLinear

__all__ = ["TOLERANCE", "Pack", "Together", "agree", "candidates", "replacement_of"]

logger = logging.getLogger("trencadis.torch")

TOLERANCE: Final = 1e-4
"""Largest difference between a module and its replacement, over the largest value; float32 sums in another order give 1e-6."""

ROUNDINGS: Final = 4
"""The same in 16 bits, in units of their precision: transformers rounds after each operation, a fused module once."""

_FAMILIES: Final = r"(Llama|Mistral|Mixtral|Ministral|Qwen2|Qwen2Moe|Qwen3|Qwen3Moe|Gemma|Gemma2|Gemma3)"
_NORM: Final = re.compile(f"({_FAMILIES}|Phi3)RMSNorm")
_MLP: Final = re.compile(_FAMILIES + "MLP")
_ATTENTION: Final = re.compile(_FAMILIES + "Attention")
_QKV: Final = ("q_proj", "k_proj", "v_proj")
_TENSORS: Final = ("query", "key", "value")

Pack = Callable[[list[nn.Linear]], nn.Module]

Together = Callable[[bool], bool]
"""Whether something holds on every rank; with one rank, whether it holds."""


def candidates(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules of known families, parents before their children."""
    found = [(name, type(part).__name__, part) for name, part in model.named_modules()]
    for pattern in (_ATTENTION, _MLP, _NORM):
        yield from ((name, part) for name, kind, part in found if pattern.fullmatch(kind))


def replacement_of(
    module: Any, seen: Watched, pack: Pack, native: FusedKernels, together: Together
) -> nn.Module | None:
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
        if agree(new(*seen.args), seen.output):
            return new
    return None


def _mlp(module: Any, seen: Watched, pack: Pack, native: FusedKernels, together: Together) -> GatedMLP | None:
    layers, down = [module.gate_proj, module.up_proj], module.down_proj
    names = {name for name, part in module.named_children() if list(part.parameters())}
    activation = ACTIVATIONS.get(_activation_name(module))
    if activation is None or names != {"gate_proj", "up_proj", "down_proj"} or not _are_linear(*layers, down):
        return None
    if not together(agree(GatedMLP(_Beside(layers), down, activation, native)(*seen.args), seen.output)):
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
        all(agree(again[name], seen.handed[name]) for name in _TENSORS)
        and again.keys() - set(_TENSORS) == handed.keys()
        and all(again[name] is value or again[name] == value for name, value in handed.items())
        and agree(output[0], seen.output[0])
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


def agree(found: Any, expected: Any) -> bool:
    """Return whether a tensor is another one but for rounding, which transformers does after each operation in 16 bits. Pure."""
    if not isinstance(found, torch.Tensor) or found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    largest = float(expected.abs().max())
    allowed = TOLERANCE if found.dtype is torch.float32 else ROUNDINGS * torch.finfo(found.dtype).eps
    return bool(torch.isfinite(found).all()) and float((found - expected).abs().max()) <= allowed * largest
