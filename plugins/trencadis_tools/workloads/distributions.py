"""Distributions of lengths and times in workload files."""

from __future__ import annotations

import math
from typing import Literal

import attrs
import numpy as np
import numpy.typing as npt
from attrs.validators import ge, gt

from trencadis.records import FloatArray, Int64Array
from trencadis_tools.workloads.draws import Stream, exponentials, normals, uniforms

__all__ = ["Distribution"]


@attrs.frozen(kw_only=True)
class Distribution:
    """Distribution of lengths or times, at least 0; in a file, a number alone is a fixed distribution.

    Attributes:
        kind: fixed: always the mean; uniform: from ``min`` to ``max``; exponential: with the mean; lognormal: with the mean and
            ``cv``; zipf: ranks below twice the mean, drawn by Zipf's law with ``exponent`` and scaled to the mean: many short, few
            long.
        mean: Mean before clipping to ``min`` and ``max``; ignored by uniform.
        cv: Coefficient of variation of a lognormal distribution, before clipping.
        exponent: Exponent of a zipf distribution.
        min: Lower bound; smaller numbers are clipped to it.
        max: Upper bound; larger numbers are clipped to it.

    Raises:
        ValueError: ``min`` is above ``max``, or a uniform distribution has no ``max``.
    """

    kind: Literal["fixed", "uniform", "exponential", "lognormal", "zipf"] = "fixed"
    mean: float = attrs.field(default=0.0, validator=ge(0))
    cv: float = attrs.field(default=1.0, validator=gt(0))
    exponent: float = attrs.field(default=1.0, validator=gt(0))
    min: float = attrs.field(default=0.0, validator=ge(0))
    max: float = attrs.field(default=math.inf, validator=gt(0))

    def __attrs_post_init__(self) -> None:
        """Check the limits against each other."""
        if self.min > self.max:
            raise ValueError(f"min = {self.min:g} is above max = {self.max:g}")
        if self.kind == "uniform" and self.max == math.inf:
            raise ValueError("a uniform distribution needs max")

    def draw(self, seed: int, stream: Stream, *keys: int | npt.ArrayLike) -> FloatArray:
        """Return a number for each tuple of keys. Pure.

        Source: a lognormal distribution of mean m and coefficient of variation c is ``exp(mu + sigma N)`` with ``sigma**2 = ln(1 + c**2)``
        and ``mu = ln(m) - sigma**2 / 2``. Zipf lengths: Llumnix, benchmark/benchmark_serving.py, ``gen_random_response_lens``.
        """
        values: FloatArray
        if self.kind == "uniform":
            values = self.min + (self.max - self.min) * uniforms(seed, stream, *keys)
        elif self.kind == "exponential":
            values = self.mean * exponentials(seed, stream, *keys)
        elif self.kind == "lognormal" and self.mean:
            variance = math.log1p(self.cv**2)
            values = self.mean * np.exp(math.sqrt(variance) * normals(seed, stream, *keys) - variance / 2)
        elif self.kind == "zipf" and self.mean > 1:
            ranks = np.arange(1, math.ceil(2 * self.mean), dtype=np.float64)
            shares = ranks**-self.exponent
            shares /= shares.sum()
            drawn = np.searchsorted(np.cumsum(shares), uniforms(seed, stream, *keys)).clip(max=len(ranks) - 1)
            values = ranks[drawn] * (self.mean / float(ranks @ shares))
        else:
            values = self.mean * np.ones(np.broadcast_shapes(*[np.shape(key) for key in keys]))
        return np.clip(values, self.min, self.max)

    def draw_tokens(self, seed: int, stream: Stream, *keys: int | npt.ArrayLike) -> Int64Array:
        """Return the numbers of :meth:`draw` rounded to tokens, at least 1. Pure."""
        return np.maximum(1, np.rint(self.draw(seed, stream, *keys))).astype(np.int64)
