"""Sessions of several turns, each of several calls: an agent's loop, or, with one call per turn, a conversation.

first prompt ▶ answer ▶ tool_s ▶ + tool_tokens ▶ answer ▶ … ▶ think_s ▶ + user_tokens ▶ answer ▶ …
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np
from attrs.validators import ge

from trencadis_tools.workloads.distributions import Distribution
from trencadis_tools.workloads.draws import Stream, geometrics, keyed_hash
from trencadis_tools.workloads.workload import WorkloadRequest

__all__ = ["Sessions", "session_calls"]


@attrs.frozen(kw_only=True)
class Sessions:
    """Table ``[sessions]`` of a workload file: requests that follow the first one of each session, which ``[lengths]`` describes.

    A request is sent when the preceding answer has arrived and the time for thinking or for a tool has passed. Its prompt is the preceding
    prompt and answer, followed by new tokens.

    Attributes:
        mean_turns: Mean number of turns of a session, at least 1; geometric.
        mean_calls: Mean number of calls of a turn, at least 1; geometric.
        user_tokens: New tokens of the first call of a turn; default: 100.
        tool_tokens: New tokens of each further call of a turn; default: 500.
        think_s: Time between two turns, seconds; default: exponential with mean 30.
        tool_s: Time between two calls of a turn, seconds; default: exponential with mean 2.
        max_context_tokens: Maximum tokens of prompt and answer; a longer request has its context cut to ``cut_tokens``, of which it
            shares only its ``[prefixes]``. 0: no maximum.
        cut_tokens: Tokens of a context after a cut, 1 to ``max_context_tokens``.
    """

    mean_turns: float = attrs.field(default=1.0, validator=ge(1))
    mean_calls: float = attrs.field(default=1.0, validator=ge(1))
    user_tokens: Distribution = attrs.field(factory=lambda: Distribution(mean=100.0))
    tool_tokens: Distribution = attrs.field(factory=lambda: Distribution(mean=500.0))
    think_s: Distribution = attrs.field(factory=lambda: Distribution(kind="exponential", mean=30.0))
    tool_s: Distribution = attrs.field(factory=lambda: Distribution(kind="exponential", mean=2.0))
    max_context_tokens: int = attrs.field(default=0, validator=ge(0))
    cut_tokens: int = attrs.field(default=0, validator=ge(0))

    def __attrs_post_init__(self) -> None:
        """Check the limits against each other."""
        if self.max_context_tokens and not 0 < self.cut_tokens < self.max_context_tokens:
            raise ValueError(
                f"cut_tokens = {self.cut_tokens} must be from 1 to max_context_tokens = {self.max_context_tokens}"
            )


def session_calls(
    sessions: Sessions, first: WorkloadRequest, outputs: Distribution, *, seed: int, index: int
) -> Iterator[WorkloadRequest]:
    """Yield the requests of one session. Pure.

    Args:
        sessions: Number and lengths of the follow-up requests.
        first: First request of the session, with the length of its answer.
        outputs: Distribution of the lengths of the other answers.
        seed: Seed of the workload.
        index: Index of the session in the workload.
    """
    num_turns = int(geometrics(seed, Stream.TURNS, index, mean=sessions.mean_turns))
    calls = geometrics(seed, Stream.CALLS, index, np.arange(num_turns), mean=sessions.mean_calls)
    num_calls = int(calls.sum())
    numbers = np.arange(num_calls)
    is_turn = np.zeros(num_calls, np.bool_)
    is_turn[np.cumsum(calls)[:-1]] = True
    new = np.where(
        is_turn,
        sessions.user_tokens.draw_tokens(seed, Stream.NEW_TOKENS, index, numbers),
        sessions.tool_tokens.draw_tokens(seed, Stream.NEW_TOKENS, index, numbers),
    )
    pauses_s = np.where(
        is_turn,
        sessions.think_s.draw(seed, Stream.THINKING, index, numbers),
        sessions.tool_s.draw(seed, Stream.TOOLS, index, numbers),
    )
    answers = outputs.draw_tokens(seed, Stream.OUTPUTS, index, numbers)
    session = first.session or first.request_id
    before = attrs.evolve(first, request_id=f"{first.request_id}.0", session=session)
    yield before
    for number in range(1, num_calls):
        num_prompt = before.num_prompt_tokens + before.num_output_tokens + int(new[number])
        num_output = int(answers[number])
        block_ids: tuple[int, ...] = ()
        if sessions.max_context_tokens and num_prompt + num_output > sessions.max_context_tokens:
            num_prompt = max(1, min(num_prompt, sessions.cut_tokens))
            # Without a prefix the prompt gets a unique id, since no id would mean that it continues the preceding answer.
            block_ids = first.block_ids or (int(keyed_hash(seed, Stream.CUTS, index, number)),)
        before = attrs.evolve(
            before,
            request_id=f"{first.request_id}.{number}",
            num_prompt_tokens=num_prompt,
            num_output_tokens=num_output,
            after=before.request_id,
            think_s=float(pauses_s[number]),
            block_ids=block_ids,
        )
        yield before
