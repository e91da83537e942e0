"""Which requests to admit: dynamic programming over requests in the order of their deadlines.

Until a deadline there are so many steps; a step has room for so many tokens beside its decodes; a request is admitted if the room until its
deadline is enough for its prompt and for those admitted before it. From its deadline on it decodes, and leaves less room to the others.

Source: Chen et al., "SLOs-Serve: Optimized Serving of Multi-SLO LLMs", arXiv 2504.08784, 2025. There the state counts the admitted
requests of each tier of TPOT, as a loose tier decodes in some steps only. Here every running sequence decodes in every step, so the number
of them and the length of a step say everything, and each length is tried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import attrs

from trencadis.records import StepTime

__all__ = ["Candidate", "Room", "admitted"]

_LITTLE = 1e-6
"""Tokens that rounding may take."""


class Candidate(NamedTuple):
    """A request whose prompt is not computed.

    Attributes:
        within_s: Its first token is due in so many seconds, above 0.
        num_tokens: That are left to compute.
        num_blocks: Of KV cache that it needs until it ends.
        tpot_s: Most seconds between its tokens.
    """

    within_s: float
    num_tokens: int
    num_blocks: int
    tpot_s: float


@attrs.frozen(kw_only=True)
class Room:
    """What the device can do beside the sequences that decode, which are taken to go on.

    Attributes:
        step_time: The model of it.
        max_tokens: Of a step.
        num_decodes: Sequences that decode.
        num_context: KV entries that they read in a step.
        tpot_s: Most seconds of a step that they allow.
        slack_s: Seconds that they can pause.
        max_step_s: Most seconds of a step meanwhile.
        num_blocks: Of KV cache.
        num_rows: Further sequences that may run.
        row_context: KV entries that a further sequence reads in a step.
    """

    step_time: StepTime
    max_tokens: int
    num_decodes: int = 0
    num_context: float = 0.0
    tpot_s: float = math.inf
    slack_s: float = 0.0
    max_step_s: float = 0.0
    num_blocks: int = 1 << 30
    num_rows: int = 1 << 30
    row_context: float = 0.0

    def holds(self, num_more: int, step_s: float) -> bool:
        """Return whether steps can be so short with so many sequences more. Pure."""
        context = self.num_context + num_more * self.row_context
        return self.step_time.step_s(float(self.num_decodes + num_more), context) <= step_s

    def prompt_tokens(self, within_s: float, num_more: int, step_s: float, *, pause_s: float = 0.0) -> float:
        """Return how many prompt tokens can be computed in a time, in steps of ``step_s`` at most, the last one perhaps shorter. Pure.

        Args:
            within_s: The time, seconds.
            num_more: Sequences that decode beside those that do now.
            step_s: Seconds.
            pause_s: Steps of the first so many seconds hold prompt tokens only, no decodes.
        """
        pause_s = min(within_s, pause_s)
        found = self._prompt_tokens(pause_s, 0, 0.0, self.max_step_s) if pause_s else 0.0
        context = self.num_context + num_more * self.row_context
        return found + self._prompt_tokens(within_s - pause_s, self.num_decodes + num_more, context, step_s)

    def _prompt_tokens(self, within_s: float, num_decodes: int, context: float, step_s: float) -> float:
        step_s = min(step_s, self.step_time.step_s(float(self.max_tokens), context))
        num_steps, rest_s = divmod(within_s, step_s)
        of_step = max(0.0, self.step_time.max_tokens(step_s, context) - num_decodes)
        of_rest = max(0.0, self.step_time.max_tokens(rest_s, context) - num_decodes)
        return num_steps * of_step + of_rest


def admitted(candidates: Sequence[Candidate], room: Room) -> tuple[list[int], bool]:
    """Return the indices of as many candidates as possible that all meet their objectives, by deadline, and whether decodes pause. Pure.

    Of sets of one size it is the one that leaves the most room after its last deadline; of lengths of steps it is the longest, without
    a pause if that is no better.

    Args:
        candidates: O(n²) operations for n of them and a length; there are as many lengths as different ``tpot_s``.
        room: Of the device.
    """
    best: tuple[list[int], bool] = [], False
    steps_s = sorted({min(room.tpot_s, one.tpot_s) for one in candidates}, reverse=True)
    for pause_s in (0.0, room.slack_s) if room.slack_s else (0.0,):
        for step_s in steps_s:
            eligible = [index for index, one in enumerate(candidates) if one.tpot_s >= step_s]
            if len(eligible) > len(best[0]):
                found = _most([(candidates[index], index) for index in eligible], room, step_s, pause_s)
                best = max(best, (found, pause_s > 0), key=lambda one: len(one[0]))
    return best


# Prompt tokens that are left until the last deadline, blocks that are taken, and who was admitted: a linked list of indices.
_State = tuple[float, int, Any]


def _most(candidates: list[tuple[Candidate, int]], room: Room, step_s: float, pause_s: float) -> list[int]:
    """Return the largest set of candidates with steps of one length; states by the number admitted, none of which another one is better than."""
    states: list[list[_State]] = [[(0.0, 0, None)]]
    at_s = 0.0
    for one, index in sorted(candidates):
        for number, some in enumerate(states):
            grown = room.prompt_tokens(one.within_s, number, step_s, pause_s=pause_s)
            grown -= room.prompt_tokens(at_s, number, step_s, pause_s=pause_s)
            states[number] = [(left + grown, blocks, chosen) for left, blocks, chosen in some]
        at_s = one.within_s
        for number in range(len(states) - 1, -1, -1):
            if number >= room.num_rows or not room.holds(number + 1, step_s):
                continue
            further = [
                (left - one.num_tokens, blocks + one.num_blocks, (index, chosen))
                for left, blocks, chosen in states[number]
                if left + _LITTLE >= one.num_tokens and blocks + one.num_blocks <= room.num_blocks
            ]
            if further and number + 1 == len(states):
                states.append([])
            if further:
                states[number + 1] = _undominated(states[number + 1] + further)
    indices = []
    chosen = max(states[-1], key=lambda state: state[0])[2]
    while chosen is not None:
        index, chosen = chosen
        indices.append(index)
    return indices[::-1]


def _undominated(states: list[_State]) -> list[_State]:
    """Return the states that no other one beats in both room and blocks."""
    kept: list[_State] = []
    for state in sorted(states, key=lambda state: (-state[0], state[1])):
        if not kept or state[1] < kept[-1][1]:
            kept.append(state)
    return kept
