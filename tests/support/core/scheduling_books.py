"""The books that histories of an engine are checked against: what each request has had, kept from plans and outputs alone.

Nothing here asks the engine what it believes. Numbers in messages are those of the list of scheduler invariants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from trencadis.records import Plan, Request
from trencadis_testing.fakes import fake_text

__all__ = ["Book", "Books"]


@attrs.define
class Book:
    """What is known of a live request from outside the engine.

    Attributes:
        request: The request.
        text: Its prompt and all that the fake model has to say after it, token ids.
        num_tokens: Its tokens, those in flight included.
        next_start: Where its next chunk must start; None until it is admitted.
        swapped: Where it goes on if it comes back from host memory; -1: it was never preempted.
    """

    request: Request
    text: list[int]
    num_tokens: int
    next_start: int | None = None
    swapped: int = -1

    @property
    def is_preempted(self) -> bool:
        """Whether it ran, and waits."""
        return self.next_start is None and self.swapped >= 0


class Books:
    """The books of all live requests of one engine on a fake backend.

    Args:
        block_size: Tokens per block.
        max_model_len: Longest sequence, tokens.
        swaps: Whether preempted sequences may come back as they were.
    """

    def __init__(self, *, block_size: int, max_model_len: int, swaps: bool = False) -> None:
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._swaps = swaps
        self._computed: dict[str, set[tuple[int, ...]]] = {}  # beginnings whose KV was computed, by cache salt
        self._in_flight: dict[int, list[tuple[str, int]]] = {}
        self.live: dict[str, Book] = {}
        self.num_preempted = 0

    def open(self, request: Request) -> None:
        """Open the book of a request that was taken."""
        prompt = list(request.prompt_token_ids)
        most = min(request.params.max_tokens or 0, self._max_model_len - len(prompt))
        eos = -1 if request.params.ignore_eos else 0
        text = prompt + fake_text(prompt, most, eos=eos)
        self.live[request.request_id] = Book(request, text, len(prompt))

    def close(self, name: str) -> Book:
        """Close the book of a request that ended; returns it."""
        return self.live.pop(name)

    def true_output(self, name: str) -> list[int]:
        """Return the only text that a request may end with."""
        book = self.live[name]
        return book.text[len(book.request.prompt_token_ids) :]

    def check_plan(self, plan: Plan, names: Mapping[int, str], *, token_budget: int, may_admit_beside: bool) -> None:
        """Check a plan, and enter it.

        Args:
            plan: The plan.
            names: Requests by slot.
            token_budget: Of a step.
            may_admit_beside: Whether others may be admitted in a step that preempts.

        Raises:
            AssertionError: The plan is none that may follow.
        """
        scheduled, preempted = plan.slots.tolist(), plan.preempted.tolist()
        self.num_preempted += len(preempted)
        assert int(plan.num_scheduled.sum()) <= token_budget, "4: more tokens than the budget"
        assert len(set(scheduled)) == len(scheduled), "8: scheduled twice in one step"
        assert not set(scheduled) & set(preempted), "13: preempted and scheduled in one step"
        assert not (preempted and plan.admitted.size) or may_admit_beside, "16: admitted in a step that preempted"
        for slot in preempted:
            book = self.live[names[slot]]
            assert book.next_start is not None, "3: preempted, and did not run"
            book.swapped, book.next_start = book.next_start, None
        drafts = plan.drafts.num_drafts.tolist() if plan.drafts is not None else [0] * len(scheduled)
        admitted = set(plan.admitted.tolist())
        assert admitted <= set(scheduled), "5: admitted, and not scheduled"
        rows = zip(
            scheduled, plan.starts.tolist(), plan.num_scheduled.tolist(), plan.samples.tolist(), drafts, strict=True
        )
        self._in_flight[plan.step] = []
        for slot, start, length, samples, num_drafts in rows:
            book = self.live[names[slot]]
            (self._check_admitted if slot in admitted else self._check_continued)(book, start)
            self._enter(book, start + length, num_drafts, samples=samples)
            self._in_flight[plan.step].append((names[slot], num_drafts))

    def committed(self, step: int, num_emitted: Sequence[int]) -> None:
        """Enter what came of a step: rejected drafts were computed in vain (29).

        Args:
            step: Number of its plan.
            num_emitted: Tokens of each of its entries.
        """
        for (name, num_drafts), emitted in zip(self._in_flight.pop(step), num_emitted, strict=True):
            book = self.live.get(name)
            if book is None or book.next_start is None or not num_drafts:
                continue
            assert 1 <= emitted <= 1 + num_drafts, "29: more tokens than were verified"
            book.next_start -= num_drafts - (emitted - 1)
            book.num_tokens += emitted - 1

    # ------------------------------------------------------------------------------------------------- innards

    def _check_admitted(self, book: Book, start: int) -> None:
        assert book.next_start is None, "3: it is admitted and runs already"
        assert start < book.num_tokens, "30: no token is left to compute"
        if self._swaps and start == book.swapped:
            return
        assert start % self._block_size == 0, "30: part of a block was taken from the cache"
        known = self._computed.get(book.request.cache_salt, set())
        assert not start or tuple(book.text[:start]) in known, "30: taken from the cache, and nobody put it there"

    def _check_continued(self, book: Book, start: int) -> None:
        assert book.next_start is not None, "3: it runs and was never admitted"
        assert start <= book.next_start, "7: a chunk skips tokens"
        assert start == book.next_start, "7, 29: a chunk overlaps the one before"

    def _enter(self, book: Book, end: int, num_drafts: int, *, samples: bool) -> None:
        assert end <= self._max_model_len, "6: beyond the longest sequence"
        if samples:
            assert end - num_drafts == book.num_tokens, "6, 8: a token is sampled, and not after the last one"
            book.num_tokens += 1
        else:
            assert end < book.num_tokens, "6, 8: all tokens are computed, and none is sampled"
        book.next_start = end
        known = self._computed.setdefault(book.request.cache_salt, set())
        size = self._block_size
        known.update(tuple(book.text[:stop]) for stop in range(size, end + 1, size))
