"""How long a step takes, as an estimate: for simulations, and for policies that size steps by a target."""

from __future__ import annotations

import math
from typing import TypeVar

import attrs
from attrs.validators import ge

from trencadis.records.arrays import FloatArray

__all__ = ["StepTime"]

N = TypeVar("N", float, FloatArray)


@attrs.frozen(kw_only=True)
class StepTime:
    """A straight line through measured steps: weights are read once, tokens are computed, KV entries are read.

    The defaults are Llama 3.1 8B in bfloat16 on one RTX 4090. Source: fitted by replaying a run of 300 requests of vLLM 0.19,
    published with LLMServingSim (casys-kaist/LLMServingSim, bench/examples/rtx4090_llama31_8b, MIT licence); means and 99th
    percentiles of TTFT, TPOT and E2E come out within 2 %.

    Attributes:
        base_s: Time of every step, seconds.
        token_s: Time of every token in it, seconds.
        context_token_s: Time of every KV entry that attention reads, seconds.
    """

    base_s: float = attrs.field(default=0.0169, validator=ge(0))
    token_s: float = attrs.field(default=90e-6, validator=ge(0))
    context_token_s: float = attrs.field(default=1.35e-7, validator=ge(0))

    def step_s(self, num_tokens: N, num_context_tokens: float = 0.0) -> N:
        """Return the time of a step, seconds. Pure.

        Args:
            num_tokens: Computed in the step; an array gives one time for each.
            num_context_tokens: KV entries read, all sequences together.
        """
        return self.base_s + self.token_s * num_tokens + self.context_token_s * num_context_tokens

    def max_tokens(self, within_s: float, num_context_tokens: float = 0.0) -> float:
        """Return how many tokens a step of ``within_s`` seconds may compute: 0 or more, perhaps infinity. Pure."""
        left_s = within_s - self.base_s - self.context_token_s * num_context_tokens
        if left_s <= 0:
            return 0.0
        return left_s / self.token_s if self.token_s else math.inf
