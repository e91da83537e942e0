"""Beam search algorithm for one prompt; :mod:`trencadis.client.beam_request` runs it on an engine.

    live beams ─the likeliest next tokens of each▶ candidates, by sum of log-probabilities
      ├─ the best that do not end, ``beam_width`` of them ─▶ live beams of the next step
      └─ those among the best ``beam_width`` that end    ─▶ pool of the best ended ones, by score

A beam offers ``beam_width`` tokens and one more for each token that may end a text: so many of all candidates are enough, however
they are spread over the beams, for ``beam_width`` of them to go on.

Source: transformers 5, ``GenerationMixin._beam_search``, whose scores and whose end these are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import attrs

from trencadis.records import BeamSearchParams, TokenLogprobs

__all__ = ["Beam", "BeamSearch", "EndedBeam"]


@attrs.frozen(eq=False)
class Beam:
    """The beginning of a continuation; beams share what they have in common.

    Attributes:
        parent: The beam it continues; None for the empty one.
        token_id: Last token of the beam; -1 for the empty one.
        total: Sum of the log-probabilities of its tokens.
        entry: Log-probabilities at its last token; None for the empty one.
    """

    parent: Beam | None = None
    token_id: int = -1
    total: float = 0.0
    entry: TokenLogprobs | None = None

    def path(self) -> list[Beam]:
        """Return the beams of its tokens, in order. Pure; O(length)."""
        beams: list[Beam] = []
        beam = self
        while beam.parent is not None:
            beams.append(beam)
            beam = beam.parent
        return beams[::-1]

    def token_ids(self) -> tuple[int, ...]:
        """Return its tokens, in order. Pure; O(length)."""
        return tuple(beam.token_id for beam in self.path())


@attrs.frozen(eq=False)
class EndedBeam:
    """A continuation that is complete.

    Attributes:
        beam: Beam with its tokens.
        score: Sum of the log-probabilities by length to the power of the penalty.
    """

    beam: Beam
    score: float


class BeamSearch:
    """The search below one prompt; :meth:`advance` it until there are no live beams.

    Args:
        params: How to search.
        end_token_ids: Tokens that end a text.
        max_tokens: The most tokens of a continuation, at least 1.

    Attributes:
        live: Beams to continue, best first; empty once the search is over.
        ended: The best complete continuations, best first, at most ``beam_width``.
    """

    def __init__(self, params: BeamSearchParams, *, end_token_ids: frozenset[int], max_tokens: int) -> None:
        self.live: list[Beam] = [Beam()]
        self.ended: list[EndedBeam] = []
        self._params = params
        self._ends = end_token_ids
        self._max_tokens = max_tokens
        self._length = 0

    @property
    def num_candidates(self) -> int:
        """How many of its likeliest next tokens each live beam must offer."""
        return self._params.beam_width + len(self._ends)

    def advance(self, entries: Sequence[TokenLogprobs]) -> None:
        """Continue each live beam by a token.

        Args:
            entries: The likeliest next tokens of each live beam, in their order; fewer than :attr:`num_candidates` only if the
                vocabulary has no more.
        """
        width = self._params.beam_width
        # Among equals the better beam first, then its likelier token: the sort keeps the order it finds.
        candidates = sorted(self._candidates(entries), key=lambda beam: -beam.total)
        self._length += 1
        is_last = self._length == self._max_tokens
        for beam in candidates[:width]:
            if is_last or beam.token_id in self._ends:
                self.ended.append(EndedBeam(beam, self._score(beam.total, self._length)))
        self.ended = sorted(self.ended, key=lambda ended: -ended.score)[:width]
        unfinished = [] if is_last else [beam for beam in candidates if beam.token_id not in self._ends][:width]
        self.live = [] if not unfinished or self._is_settled(unfinished[0]) else unfinished

    def _candidates(self, entries: Sequence[TokenLogprobs]) -> Iterator[Beam]:
        for beam, entry in zip(self.live, entries, strict=True):
            for token, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True):
                if logprob > -math.inf:
                    yield Beam(beam, token, beam.total + logprob, entry)

    def _is_settled(self, best: Beam) -> bool:
        """Return whether running beams, of which this is the best, are given up."""
        params = self._params
        if len(self.ended) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        hopes = params.early_stopping == "never" and params.length_penalty > 0
        length = self._max_tokens if hopes else self._length
        return self._score(best.total, length) <= self.ended[-1].score

    def _score(self, total: float, length: int) -> float:
        return float(total / length**self._params.length_penalty)
