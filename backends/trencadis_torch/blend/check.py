"""Can a model's KV be blended? Asked of the model itself: how it rotates keys, and whether its layers can be called one by one."""

from __future__ import annotations

from typing import Any

import torch

from trencadis.errors import BackendError
from trencadis_torch.attention.adapter import PASS_ARGUMENT
from trencadis_torch.attention.whole_texts import WholeTexts
from trencadis_torch.blend.partial_forward import LayerWalk
from trencadis_torch.blend.reposition import Pairs, Rotary, unrotate
from trencadis_torch.cache.kv_cache import AttentionLayer

__all__ = ["check_layers", "pairs_of_layers"]

_NUM_TOKENS = 8
_OFFSET = 37
_EXACT, _ROUNDED = 1e-3, 5e-2
"""Largest difference over the largest element: in float32, and in 16 bits."""


@torch.inference_mode()
def check_layers(model: Any, walk: LayerWalk, layers: tuple[AttentionLayer, ...]) -> None:
    """Compare the keys and values of a walk through the layers with those of the model's own forward.

    Raises:
        BackendError: They differ, or there are layers that blending does not know.
    """
    name = type(model).__name__
    if [layer.index for layer in layers] != list(range(len(walk))):
        raise BackendError(f"{name} has {len(walk)} layers, {len(layers)} of which attend.")
    if any(layer.window for layer in layers):
        raise BackendError(f"{name} has layers with a sliding window.")
    tokens, positions = _tokens(model.device), torch.arange(_NUM_TOKENS, device=model.device)
    whole, stepwise = (_Recorder(layers) for _ in range(2))
    model.base_model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, **{PASS_ARGUMENT: whole})
    walkers = walk.begin(tokens, positions)
    for index in range(len(walk)):
        walkers = walk.through(index, walkers, stepwise)
    for index in range(len(walk)):
        for one, other in zip(whole.found[index], stepwise.found[index], strict=True):
            if _difference(one, other) > _tolerance(one):
                raise BackendError(f"{name}: called one by one, its layers do not give what the model gives.")


@torch.inference_mode()
def pairs_of_layers(
    walk: LayerWalk, rotary: Rotary, device: torch.device, layers: tuple[AttentionLayer, ...]
) -> tuple[Pairs, ...]:
    """Return which elements of each layer's keys are turned together: those with which two positions give the same plain keys.

    Raises:
        BackendError: No way of turning them that is known here does.
    """
    tokens = _tokens(device)
    sets = [torch.arange(_NUM_TOKENS, device=device) + offset for offset in (1, _OFFSET)]
    walkers = [walk.begin(tokens, positions) for positions in sets]
    angles = [rotary.angles(positions) for positions in sets]
    found = []
    for index in range(len(layers)):
        keys = [walk.look(index, one)[0] for one in walkers]
        for pairs in Pairs:
            plain = [unrotate(one.float(), turn, pairs) for one, turn in zip(keys, angles, strict=True)]
            if _difference(*plain) <= _tolerance(keys[0]):
                found.append(pairs)
                break
        else:
            raise BackendError(f"The keys of layer {index} depend on the position in a way that is not known here.")
    return tuple(found)


class _Recorder:
    """Attends as a whole text does, and keeps every layer's keys and values."""

    def __init__(self, layers: tuple[AttentionLayer, ...]) -> None:
        self._texts = WholeTexts(layers, [_NUM_TOKENS])
        self.found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(
        self, layer_index: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        self.found[layer_index] = keys, values
        return self._texts.attend(layer_index, query, keys, values, **options)


def _tokens(device: torch.device) -> torch.Tensor:
    return torch.arange(_NUM_TOKENS, device=device) * 13 + 5


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).abs().max() / one.float().abs().max().clamp_min(1e-12))


def _tolerance(one: torch.Tensor) -> float:
    return _EXACT if one.dtype == torch.float32 else _ROUNDED
