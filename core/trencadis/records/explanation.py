"""Why a request was or was not scheduled, step by step; steps of equal outcome are one span."""

from __future__ import annotations

import attrs

__all__ = ["Explanation", "Range", "Span"]

Range = tuple[int, int]
"""The least and the greatest of a number over the steps of a span."""


@attrs.frozen(kw_only=True)
class Span:
    """Steps in a row in which the same happened to a request for the same reason.

    Attributes:
        first_step: Number of the first of them.
        last_step: Number of the last.
        num_steps: How many; fewer than the numbers span where nothing was planned.
        first_s: When the first was planned, seconds after the request arrived.
        last_s: The same of the last.
        outcome: ``compiling``, ``waited``, ``loading``, ``prefill``, ``decode``, ``held`` (it had its blocks and was given no token), ``preempted``
            or ``failed``.
        reason: In words; empty if there is nothing to add.
        policy: Component that was asked.
        other: Request for which, or after which; empty: none.
        num_tokens: Tokens of it that were computed in these steps.
        tokens: Computed tokens before the first and after the last, of a prefill or decode.
        rank: Place in the order of admission, 1 is first; None: nothing was ordered, or it came after place 4096.
        num_waiting: Sequences that waited, before planning.
        num_running: Sequences that ran, after planning.
        budget_left: Tokens left for admission, where a sequence could have been admitted.
        blocks_needed: Where blocks were short: what it took.
        blocks_free: Blocks that could be had: where they were short, at that point, else before planning.
        buckets: The shapes that it ran in, at most four.
    """

    first_step: int
    last_step: int
    num_steps: int
    first_s: float
    last_s: float
    outcome: str
    reason: str
    policy: str
    other: str = ""
    num_tokens: int = 0
    tokens: Range | None = None
    rank: Range | None = None
    num_waiting: Range
    num_running: Range
    budget_left: Range | None = None
    blocks_needed: Range | None = None
    blocks_free: Range
    buckets: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Explanation:
    """One request in the engine, as far as the step record reaches.

    Attributes:
        request_id: The engine's: one of n completions is ``id/0``.
        state: ``compiling``, ``waiting``, ``loading``, ``running`` or ``finished``.
        finish_reason: Empty unless it is finished.
        error: Why it failed, if it did.
        num_prompt_tokens: Number of prompt tokens of the request.
        num_output_tokens: So far.
        is_complete: The record reaches back to its arrival.
        spans: Oldest first.
    """

    request_id: str
    state: str
    finish_reason: str = ""
    error: str = ""
    num_prompt_tokens: int
    num_output_tokens: int
    is_complete: bool
    spans: tuple[Span, ...]
