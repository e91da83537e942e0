"""By what an attention multiplies its queries at each position, read off its code by numbers in place of its projections."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import attrs
import torch
from torch import nn

from trencadis_torch.linear.watch import HANDED, Watched, register
from trencadis_torch.parallel.heads import LocalConfig

__all__ = ["FAR", "QueryScales", "StepScales", "alike", "query_scales"]

FAR: Final = 10_000_019
"""A position that no text reaches, and that no period of angles or scales is likely to divide."""

_TRIED: Final = torch.cat([torch.arange(20), torch.arange(0, 1 << 21, 1021), torch.tensor([FAR])])
"""Positions at which scales are compared."""

QueryScales = Callable[[torch.Tensor], torch.Tensor]
"""Scales, float32 ``[T]``, of int64 positions ``[T]``."""


def query_scales(module: Any, seen: Watched, inputs: Sequence[Any], last: Any) -> QueryScales | None:
    """Return by what an attention multiplies all its queries after they are turned; None: by nothing that positions alone decide.

    Args:
        module: The attention, whose weights are not used.
        seen: A call of it.
        inputs: Projections of queries, keys and values.
        last: The one back.
    """
    if not isinstance(seen.options.get("position_ids"), torch.Tensor):
        return None
    scales = _Scales(module, seen, inputs, last)
    found = scales(_TRIED)
    if found is None or not bool((found != 1).any()):
        return None
    return next((one for one in _steps(module) if torch.equal(one(_TRIED), found)), scales)


@attrs.frozen
class StepScales:
    """Scales that grow with the logarithm of how many periods lie before a position: ``1 + factor * log(1 + floor(position / period))``.

    Attributes:
        factor: See there.
        period: Positions.

    Source: ``get_llama_4_attn_scale`` in transformers' ``modeling_ministral3.py``.
    """

    factor: float
    period: float

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """Return scales, float32 ``[T]``."""
        return 1 + self.factor * torch.log(1 + torch.floor(positions / self.period))


def _steps(module: Any) -> Iterator[StepScales]:
    """Yield the scales in steps that an attention may have, by the numbers of its configuration."""
    ropes = getattr(module.config, "rope_parameters", None) or {}
    numbers = dict.fromkeys(float(one) for one in ropes.values() if type(one) in (int, float))
    for factor, period in itertools.permutations(numbers, 2):
        if period > 0:
            yield StepScales(factor, period)


def alike(one: QueryScales | None, other: QueryScales | None) -> bool:
    """Return whether two give the same at many positions."""
    return one is other or (one is not None and other is not None and torch.equal(one(_TRIED), other(_TRIED)))


class _Ones(nn.Module):
    """Gives ones for each token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_ones(*x.shape[:-1], self._width)


class _Scales:
    """An attention whose projections give ones, and whose angles are 0: what is left of its queries are their scales."""

    def __init__(self, module: Any, seen: Watched, inputs: Sequence[Any], last: Any) -> None:
        self._tried = copy.copy(module)
        instead = {id(one): _Ones(one.out_features) for one in inputs} | {id(last): nn.Identity()}
        self._tried.__dict__["_modules"] = {
            name: instead.get(id(child), nn.Identity()) for name, child in module.named_children()
        }
        self._tried.__dict__["config"] = LocalConfig(module.config, _attn_implementation=HANDED)
        self._args, self._options = seen.args, {**seen.options, "attention_mask": None, HANDED: None}

    @torch.no_grad()
    def __call__(self, positions: torch.Tensor) -> Any:
        found: dict[str, Any] = {}
        args = [self._at(one, positions) for one in self._args]
        options = {name: self._at(one, positions) for name, one in self._options.items()}
        register()
        self._tried(*args, **{**options, "position_ids": positions[None], HANDED: found})
        query, key = found["query"], found["key"]
        scales = query[0, 0, :, 0].float().contiguous()
        is_plain = bool((key == 1).all()) and bool((query == query[:, :1, :, :1]).all())
        return scales if is_plain else None

    @staticmethod
    def _at(one: Any, positions: torch.Tensor) -> Any:
        """Return an argument for these positions: hidden states of zeros, angles of 0."""
        if isinstance(one, tuple) and len(one) == 2:
            shape = (1, len(positions), one[0].shape[-1])
            return torch.ones(shape), torch.zeros(shape)
        is_hidden = isinstance(one, torch.Tensor) and one.dim() == 3
        return torch.zeros(1, len(positions), one.shape[-1]) if is_hidden else one
