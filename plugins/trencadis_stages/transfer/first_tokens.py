"""Validates and applies first tokens received from another engine.

lookup ─▶ Hit with a first token ─▶ take ─┬─ refused ─▶ the engine chooses its own
                                          └─ taken ─▶ shown with this step's tokens; loaded and run on, or ended by it
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable

import attrs
import msgspec
import numpy as np

from trencadis.engine.sequences import Sequence
from trencadis.engine.state import EngineState
from trencadis.records import FinishedSequence, FirstToken, Int32Array, RowStart, TokenDeltas, TokenLogprobs

__all__ = ["FirstTokens"]

logger = logging.getLogger("trencadis.engine")


class FirstTokens:
    """First tokens that other engines chose for sequences of this one.

    Args:
        state: The engine's state.
        append: Gives tokens to a sequence that holds no row; returns it if the last of them ends it.
        vocab_size: Legal token ids are 0 .. vocab_size - 1.
        can_start_with: Whether the sampler could have chosen a token for a sequence that is at the end of its prompt.

    Attributes:
        results: Counts of them by outcome: ``taken``; else why not: ``late``, the sequence has a token or runs; ``vocabulary``, it is none;
            ``forbidden``, the request rules it out; ``logprobs``, what was asked for is missing.
        num_new: Taken since the newest step was planned.
    """

    def __init__(
        self,
        state: EngineState,
        *,
        append: Callable[[Sequence, Int32Array], FinishedSequence | None],
        vocab_size: int = 1 << 31,
        can_start_with: Callable[[RowStart, int], bool] = lambda _, __: True,
    ) -> None:
        self._state = state
        self._append = append
        self._vocab_size = vocab_size
        self._can_start_with = can_start_with
        self._taken: list[tuple[int, FirstToken]] = []
        self.results: Counter[str] = Counter()
        self.num_new = 0

    def take(self, sequence: Sequence, first: FirstToken) -> FinishedSequence | None:
        """Append a first token to a sequence that waits, if it is valid; returns the sequence if the token ended it."""
        state = self._state
        refusal = self._refusal(sequence, first, state)
        self.results[refusal or "taken"] += 1
        if refusal:
            logger.warning(
                "The first token of request %r, %r, which the KV connector brought, is refused (%s): it is chosen here.",
                sequence.request.request_id,
                first.token_id,
                refusal,
            )
            return None
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = state.clock.now_s()
        self._taken.append((sequence.slot, _placed(first, len(sequence.tokens))))
        self.num_new += 1
        return self._append(sequence, np.array([first.token_id], np.int32))

    def take_num_new(self) -> int:
        """Return and clear the number of tokens taken."""
        num_new, self.num_new = self.num_new, 0
        return num_new

    def ahead_of(self, deltas: TokenDeltas) -> TokenDeltas:
        """Return the deltas of tokens taken since the last step, before those of this step; clears them.

        A sequence whose prefix is loaded layer by layer, or not at all in the end, may run in the step that was planned with its token.
        """
        if not self._taken:
            return deltas
        taken, self._taken = self._taken, []
        logprobs = [
            msgspec.structs.replace(first.logprobs, index=i)
            for i, (_, first) in enumerate(taken)
            if first.logprobs is not None
        ]
        logprobs += [msgspec.structs.replace(entry, index=entry.index + len(taken)) for entry in deltas.logprobs]
        counts = np.concatenate([np.ones(len(taken), np.int32), deltas.num_tokens])
        tokens = np.concatenate([np.array([first.token_id for _, first in taken], np.int32), deltas.token_ids])
        slots, places = np.unique(
            np.concatenate([np.array([slot for slot, _ in taken], np.int32), deltas.slots]), return_inverse=True
        )
        return attrs.evolve(
            deltas,
            slots=slots,
            num_tokens=np.bincount(places, weights=counts).astype(np.int32),
            token_ids=tokens[np.argsort(np.repeat(places, counts), kind="stable")],
            logprobs=tuple([msgspec.structs.replace(entry, index=int(places[entry.index])) for entry in logprobs]),
        )

    def _refusal(self, sequence: Sequence, first: FirstToken, state: EngineState) -> str:
        """Return why a token is rejected; empty: it is not. Pure."""
        table, slot, params = state.table, sequence.slot, sequence.request.params
        if not state.is_waiting(slot) or table.num_tokens[slot] != table.num_prompt_tokens[slot]:
            return "late"
        token = first.token_id
        if type(token) is not int or not 0 <= token < self._vocab_size:
            return "vocabulary"
        allowed = params.allowed_token_ids
        is_masked_end = params.min_tokens > 0 and token in sequence.stop_token_ids
        if token in params.bad_token_ids or (allowed is not None and token not in allowed) or is_masked_end:
            return "forbidden"
        if params.logprobs is not None and not _are_good(first.logprobs, first, params.logprobs):
            return "logprobs"
        start = RowStart(
            row=0,
            token_ids=sequence.tokens,
            num_prompt_tokens=len(sequence.tokens),
            params=params,
            seed=sequence.seed,
            eos_token_ids=sequence.stop_token_ids,
        )
        return "" if self._can_start_with(start, token) else "forbidden"


def _are_good(found: TokenLogprobs | None, first: FirstToken, num_asked: int) -> bool:
    """Return whether log-probabilities match the token and the number requested. Pure."""
    if found is None or found.token_id != first.token_id or found.rank < 1:
        return False
    values = (found.logprob, *found.top_logprobs)
    counts = {len(found.top_token_ids), len(found.top_logprobs)}
    return counts == {num_asked} and not any(math.isnan(value) or value > 1e-3 for value in values)


def _placed(first: FirstToken, position: int) -> FirstToken:
    """Return a token at a position of its sequence. Pure."""
    if first.logprobs is None:
        return first
    return attrs.evolve(first, logprobs=msgspec.structs.replace(first.logprobs, index=0, position=position))
