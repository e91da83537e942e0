"""Taking the rotary embedding out of keys, and putting it in for other positions.

A rotary embedding turns each pair of a key's elements by an angle that grows with the position, and may scale it; both are what the
model's own module says for a position, so any scaling of the rope comes out right. Which elements form a pair is the model's habit.

Shapes: T tokens, KV heads, D head dimension, R elements that are turned, R ≤ D.
"""

from __future__ import annotations

import copy
import enum
from typing import Any

import torch

from trencadis.errors import BackendError

__all__ = ["Angles", "Pairs", "Rotary", "rotate", "unrotate"]

_UNSTEADY = frozenset({"dynamic", "longrope"})
"""Their angles depend on the longest sequence so far, not on the position alone."""


class Pairs(enum.Enum):
    """Which elements of a key are turned together."""

    NONE = "none"  # keys without positions
    HALVES = "halves"  # element i with i + R / 2
    NEIGHBOURS = "neighbours"  # element 2 i with 2 i + 1


class Angles:
    """Cosines and sines of some positions, one for each pair.

    Args:
        cos: Cosines that the model's module gives, float32 ``[T, R]``; each value stands there twice.
        sin: The same.
    """

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        half = cos.shape[-1] // 2
        by_halves = torch.equal(cos[:, :half], cos[:, half:]) and torch.equal(sin[:, :half], sin[:, half:])
        once = slice(0, half) if by_halves else slice(0, None, 2)
        self.cos = cos[:, None, once]
        self.sin = sin[:, None, once]


class Rotary:
    """The rotary module of a model, always called in float32.

    Args:
        model: Model of transformers.

    Raises:
        BackendError: It has no such module, or one whose angles do not depend on the position alone.
    """

    def __init__(self, model: Any) -> None:
        module = getattr(model.base_model, "rotary_emb", None)
        if module is None:
            raise BackendError("The model has no rotary module (base_model.rotary_emb) to say how keys are rotated.")
        named = getattr(module, "rope_type", "default")
        kinds = set(named.values()) if isinstance(named, dict) else {named}  # a dictionary: by the kind of layer
        if kinds & _UNSTEADY:
            raise BackendError(
                f'The angles of rope_type "{min(kinds & _UNSTEADY)}" change with the length of the sequence.'
            )
        self._module = module
        self._on_host = copy.deepcopy(module).cpu()

    def angles(self, positions: torch.Tensor) -> Angles:
        """Return the angles of positions, int64 ``[T]``; on the host, from any thread.

        Raises:
            BackendError: The module takes another kind of position.
        """
        module = self._on_host if positions.device.type == "cpu" else self._module
        probe = torch.empty(1, 1, 1, dtype=torch.float32, device=positions.device)
        try:
            cos, sin = module(probe, position_ids=positions[None])
        except (TypeError, ValueError, RuntimeError) as error:
            raise BackendError(f"The rotary module {type(module).__name__} cannot be asked: {error}.") from error
        if cos.shape != sin.shape or cos.shape[:2] != (1, len(positions)):
            raise BackendError(f"The rotary module {type(module).__name__} returns angles of shape {tuple(cos.shape)}.")
        return Angles(cos[0].float(), sin[0].float())


def rotate(keys: torch.Tensor, angles: Angles, pairs: Pairs) -> torch.Tensor:
    """Return keys with their positions. Pure.

    Args:
        keys: float32 ``[T, KV, D]``.
        angles: Angles of the tokens' positions.
        pairs: The model's habit.

    Source: rotary embedding, arXiv:2104.09864, equation 34.
    """
    return _turned(keys, angles.cos, angles.sin, pairs)


def unrotate(keys: torch.Tensor, angles: Angles, pairs: Pairs) -> torch.Tensor:
    """Return keys without their positions, the inverse of :func:`rotate`. Pure; arguments as there."""
    scale = angles.cos.square() + angles.sin.square()  # the square of a rope's attention factor
    return _turned(keys, angles.cos / scale, -angles.sin / scale, pairs)


def _turned(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    if pairs is Pairs.NONE:
        return keys
    half = cos.shape[-1]
    first, second = (
        (slice(0, half), slice(half, 2 * half))
        if pairs is Pairs.HALVES
        else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    )
    turned = keys.clone()
    turned[..., first] = keys[..., first] * cos - keys[..., second] * sin
    turned[..., second] = keys[..., second] * cos + keys[..., first] * sin
    return turned
