"""What a request says about blending, in its transfer parameters: ``{"blend": true, "blend_ratio": 0.15}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["blend_ratio_of", "wants_blend"]


def wants_blend(params: Mapping[str, Any] | None) -> bool:
    """Return whether a request asks for blending: nobody else gets approximate KV. Pure."""
    return params is not None and params.get("blend") is True


def blend_ratio_of(params: Mapping[str, Any] | None, default: float) -> float | None:
    """Return the share of tokens to compute anew; None for a value that is no share: such a request is computed. Pure.

    Args:
        params: The request's.
        default: For a request that names none.
    """
    given = default if params is None else params.get("blend_ratio", default)
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0.0 <= given <= 1.0:
        return None
    return float(given)
