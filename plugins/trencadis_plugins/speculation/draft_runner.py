"""Runs a draft model by the backend's contract: queries in, batches out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from trencadis.interfaces import AllocationPlan, Backend, GuessBatch, PendingStep, SupportsGuessing
from trencadis.records import Batch, BoolArray, Drafts, Int32Array, Pass, Phase, RowStart, SamplingParams, TableWrites
from trencadis_plugins.speculation.draft_memory import Held
from trencadis_plugins.speculation.draft_shapes import Buckets, Extent, shape_of

__all__ = ["DraftRunner", "Query"]

_NOTHING = np.empty(0, np.int32)


@attrs.frozen(eq=False)
class Query:
    """Work of one sequence in one forward.

    Attributes:
        held: Place in the draft model's memory.
        start: Tokens computed before.
        given: The new tokens; none: the single one that was sampled last.
        samples: A token is to be chosen after the last one.
        guessed: Number of the last new tokens that are no part of the text: a choice is wanted after each.
        parents: For guesses that branch, the index of each one's parent among them, -1 for the token before them.
    """

    held: Held
    start: int
    given: Int32Array = _NOTHING
    samples: bool = True
    guessed: int = 0
    parents: Int32Array | None = None

    @property
    def length(self) -> int:
        """New tokens."""
        return max(1, len(self.given))


@attrs.define(eq=False)
class _Item:
    query: Query
    num_drafts: int
    num_logits: int


class DraftRunner:
    """Feeds one loaded and allocated backend.

    Args:
        backend: Fed.
        plan: Plan that the backend was allocated with.
        buckets: For passes of a padded or unified layout.
        most_query: Most tokens of a sequence in a decode pass of such a layout.
    """

    def __init__(self, backend: Backend, plan: AllocationPlan, buckets: Buckets, *, most_query: int) -> None:
        self._backend = backend
        self._capabilities = backend.capabilities
        self._plan = plan
        self._buckets = buckets
        self._is_padded = backend.capabilities.layout == "padded"
        self._is_ragged = backend.capabilities.layout == "ragged"
        self._most_query = most_query
        self._starts: list[RowStart] = []
        self._writes: list[tuple[int, int, int]] = []
        self._pending: list[PendingStep] = []
        # Looked at once: which methods a protocol has takes 40 µs to find.
        self._guess = backend.guess if isinstance(backend, SupportsGuessing) else None
        self._steps = 0

    def start(self, held: Held, tokens: Int32Array, *, params: SamplingParams, seed: int) -> None:
        """Tell the backend a sequence's tokens and new blocks, with the next batch: those that it guessed may be wrong."""
        self._starts.append(
            RowStart(row=held.row, token_ids=tokens, num_prompt_tokens=len(tokens), params=params, seed=seed)
        )
        fresh = enumerate(held.blocks[held.num_written :], start=held.num_written)
        self._writes.extend((held.row, column, block) for column, block in fresh)
        held.num_written = len(held.blocks)

    def run(self, queries: Sequence[Query]) -> None:
        """Submit queries, each of another sequence, within the token budget; waits for nothing."""
        for group in self._groups(queries):
            self._pending.append(self._backend.submit(self._batch([self._item(query) for query in group])))

    def guess(
        self, queries: Sequence[Query], counts: Sequence[int], *, closed: BoolArray | None, min_probability: float
    ) -> list[Int32Array] | None:
        """Return the most likely tokens after each query, computed at once; None where the backend cannot.

        Args:
            queries: Each of another sequence, with the new tokens of its text.
            counts: How many tokens for each.
            closed: Tokens that are never chosen; None: there are none.
            min_probability: See ``GuessBatch``.
        """
        if self._guess is None:
            return None
        wanted = {query.held.row: count for query, count in zip(queries, counts, strict=True)}
        found: list[Int32Array] = []
        for group in self._groups(queries):
            num_guesses = np.array([wanted[query.held.row] for query in group], np.int32)
            guesses = self._guess(
                GuessBatch(
                    rows=np.array([query.held.row for query in group], np.int32),
                    starts=np.array([query.start for query in group], np.int32),
                    query_lens=np.array([query.length for query in group], np.int32),
                    token_ids=np.concatenate([query.given for query in group]),
                    num_guesses=num_guesses,
                    table_writes=self._table_writes(),
                    closed=closed,
                    min_probability=min_probability,
                )
            )
            if guesses is None:
                self._guess = None
                return None
            self._starts, self._writes = [], []  # rows start anew with every batch that is submitted
            found.extend(row[:count] for row, count in zip(guesses, (guesses >= 0).sum(1).tolist(), strict=True))
        return found

    def wait(self) -> None:
        """Wait for everything that was submitted.

        Raises:
            StepFailedError: The device reported an error.
        """
        pending, self._pending = self._pending, []
        for step in pending:
            step.wait()

    def _groups(self, queries: Sequence[Query]) -> Iterator[list[Query]]:
        budget = self._plan.max_num_batched_tokens
        group: list[Query] = []
        longest = total = 0
        for query in queries:
            longest, total = max(longest, query.length), total + query.length
            size = longest * (len(group) + 1) if self._is_padded else total
            if group and size > budget:
                yield group
                group, longest, total = [], query.length, query.length
            group.append(query)
        if group:
            yield group

    def _item(self, query: Query) -> _Item:
        """Return a query as the backend takes it.

        A decode pass brings new tokens as drafts. A ragged pass need not: it takes any number of them as they are.
        """
        size = query.length
        fits = query.guessed > 0 or (not self._is_ragged and size <= self._most_query)
        if size > 1 and fits:
            # What is not wanted must not be sampled: it would be written after the last token, where another one may stand.
            return _Item(query, num_drafts=size - 1, num_logits=size if query.samples else 0)
        return _Item(query, num_drafts=0, num_logits=int(query.samples))

    def _batch(self, items: Sequence[_Item]) -> Batch:
        starts, self._starts = tuple(self._starts), []
        writes, self._writes = self._table_writes(), []
        batch = Batch(
            step=self._steps,
            num_sequences=len(items),
            row_starts=starts,
            table_writes=writes,
            passes=tuple(self._passes(items)),
            drafts=_drafts(items),
        )
        self._steps += 1
        return batch

    def _table_writes(self) -> TableWrites:
        """Return the new blocks that the backend was not told yet."""
        columns = np.array(self._writes, np.int32).reshape(-1, 3)
        return TableWrites(rows=columns[:, 0].copy(), columns=columns[:, 1].copy(), block_ids=columns[:, 2].copy())

    def _passes(self, items: Sequence[_Item]) -> Iterator[Pass]:
        """Yield one pass, or of a padded layout prefills one by one and then one pass of decodes."""
        is_prefill = [item.query.length > 1 + item.num_drafts for item in items]
        everything = list(range(len(items)))
        if not self._is_padded:
            yield self._pass(items, everything, Phase.PREFILL if any(is_prefill) else Phase.DECODE)
            return
        for index in everything:
            if is_prefill[index]:
                yield self._pass(items, [index], Phase.PREFILL)
        decodes = [index for index in everything if not is_prefill[index]]
        if decodes:
            yield self._pass(items, decodes, Phase.DECODE)

    def _pass(self, items: Sequence[_Item], indices: list[int], phase: Phase) -> Pass:
        chosen = [items[index] for index in indices]
        queries = [item.query for item in chosen]
        extents = [Extent(query.start, query.length, query.held.blocks) for query in queries]
        shape = shape_of(extents, phase, self._capabilities, block_size=self._plan.block_size)
        return Pass(
            bucket=self._buckets.bucket_for(shape),
            indices=np.array(indices, np.int32),
            rows=np.array([query.held.row for query in queries], np.int32),
            starts=np.array([query.start for query in queries], np.int32),
            query_lens=np.array([query.length for query in queries], np.int32),
            num_logits=np.array([item.num_logits for item in chosen], np.int32),
            num_prompt_logits=np.zeros(len(chosen), np.int32),
        )


def _drafts(items: Sequence[_Item]) -> Drafts | None:
    """Return the new tokens that come as drafts; the guesses among them may branch, those of the text follow each other."""
    if not any(item.num_drafts for item in items):
        return None
    given = [item.query.given[1:] if item.num_drafts else _NOTHING for item in items]
    parents = None
    if any(item.query.parents is not None for item in items):
        parents = np.concatenate([_parents(item) for item in items]).astype(np.int32)
    return Drafts(
        num_drafts=np.array([item.num_drafts for item in items], np.int32),
        token_ids=np.concatenate(given).astype(np.int32),
        parents=parents,
    )


def _parents(item: _Item) -> Int32Array:
    line: Int32Array = np.arange(-1, item.num_drafts - 1, dtype=np.int32)
    query = item.query
    if query.parents is None:
        return line
    num_text = item.num_drafts - query.guessed
    return np.concatenate([line[:num_text], query.parents + num_text])
