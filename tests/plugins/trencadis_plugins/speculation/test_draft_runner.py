from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trencadis.interfaces import AllocationPlan, BackendCapabilities
from trencadis.records import Batch, Phase, Request, SamplingParams
from trencadis_plugins.speculation.draft_memory import Held
from trencadis_plugins.speculation.draft_runner import DraftRunner, Query
from trencadis_plugins.speculation.draft_shapes import Buckets

PLAN = AllocationPlan(
    num_blocks=32, block_size=4, num_rows=4, max_model_len=64, max_num_batched_tokens=15, max_draft_tokens=3
)


class Recorder:
    """A backend that keeps batches."""

    def __init__(self, layout: str) -> None:
        self.capabilities = BackendCapabilities(layout=layout, default_block_size=4)
        self.batches: list[Batch] = []
        self.num_waited = 0

    def submit(self, batch: Batch) -> Any:
        self.batches.append(batch)
        return self

    def wait(self) -> None:
        self.num_waited += 1


def runner_of(layout: str) -> tuple[DraftRunner, Recorder]:
    backend: Any = Recorder(layout)
    return DraftRunner(backend, PLAN, Buckets(), most_query=4), backend


def held(row: int, *blocks: int) -> Held:
    request = Request(request_id=str(row), prompt_token_ids=(1,), params=SamplingParams())
    return Held(slot=row, request=request, row=row, blocks=list(blocks))


def tokens(count: int, first: int = 50) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def test_a_ragged_pass_takes_new_tokens_as_they_are() -> None:
    runner, backend = runner_of("ragged")
    runner.run(
        [Query(held(0, 1, 2), 3, tokens(3)), Query(held(1, 3, 4), 4), Query(held(2, 5), 0, tokens(2), samples=False)]
    )
    (batch,) = backend.batches
    (one,) = batch.passes
    assert batch.drafts is None
    assert (one.starts.tolist(), one.query_lens.tolist(), one.num_logits.tolist()) == ([3, 4, 0], [3, 1, 2], [1, 1, 0])
    assert one.bucket.phase is Phase.PREFILL


def test_guesses_come_as_drafts_with_a_choice_behind_each() -> None:
    runner, backend = runner_of("ragged")
    branches = np.array([-1, 0, 0], np.int32)
    queries = [
        Query(held(0, 1, 2), 3, tokens(5), guessed=3, parents=branches),
        Query(held(1, 3, 4), 4, tokens(2), guessed=1),
        Query(held(2, 5, 6), 6),
    ]
    runner.run(queries)
    (batch,) = backend.batches
    (one,) = batch.passes
    assert one.num_logits.tolist() == [5, 2, 1]
    assert batch.drafts is not None
    assert batch.drafts.num_drafts.tolist() == [4, 1, 0]
    assert batch.drafts.token_ids.tolist() == [51, 52, 53, 54, 51]
    # The second token of the text hangs on the first, the tree on the second.
    assert batch.drafts.parents is not None
    assert batch.drafts.parents.tolist() == [-1, 0, 1, 1, -1]


def test_a_padded_layout_gets_prefills_one_by_one_and_the_rest_as_decodes() -> None:
    runner, backend = runner_of("padded")
    queries = [
        Query(held(0, 1, 2, 3), 3, tokens(3)),
        Query(held(1, 3, 4), 0, tokens(5), samples=False),
        Query(held(2, 5, 6), 4),
        Query(held(3, 7, 8), 2, tokens(2), samples=False),
    ]
    for query in queries:
        runner.run([query])
    alone = [batch.passes[0] for batch in backend.batches]
    assert [one.bucket.phase for one in alone] == [Phase.DECODE, Phase.PREFILL, Phase.DECODE, Phase.DECODE]
    assert [one.num_logits.tolist() for one in alone] == [[3], [0], [1], [0]]
    drafts = [None if batch.drafts is None else batch.drafts.token_ids.tolist() for batch in backend.batches]
    assert drafts == [[51, 52], None, None, [51]]
    assert alone[0].bucket.num_blocks == 2, "blocks behind the new tokens are not read"
    backend.batches.clear()
    runner.run([queries[1], queries[2], Query(held(3, 9), 1)])
    (batch,) = backend.batches
    assert [one.indices.tolist() for one in batch.passes] == [[0], [1, 2]]


def test_batches_stay_within_the_budget_and_everything_is_waited_for() -> None:
    runner, backend = runner_of("ragged")
    sizes = (9, 6, 1, 14)
    runner.run([Query(held(row, row), 0, tokens(size)) for row, size in enumerate(sizes)])
    assert [batch.num_sequences for batch in backend.batches] == [2, 2]
    assert [batch.step for batch in backend.batches] == [0, 1]
    runner.wait()
    runner.wait()
    assert backend.num_waited == 2


@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_rows_start_once_and_blocks_are_told_once(layout: str) -> None:
    runner, backend = runner_of(layout)
    place = held(2, 7, 9)
    params = SamplingParams(temperature=0.5)
    runner.start(place, tokens(6), params=params, seed=11)
    runner.run([Query(place, 5, tokens(1))])
    place.blocks.append(4)
    runner.start(place, tokens(9), params=params, seed=12)
    runner.run([Query(place, 8, tokens(1))])
    runner.run([Query(place, 9)])
    starts = [[(one.row, len(one.token_ids), one.seed) for one in batch.row_starts] for batch in backend.batches]
    assert starts == [[(2, 6, 11)], [(2, 9, 12)], []]
    writes = [batch.table_writes for batch in backend.batches]
    assert [list(zip(w.rows.tolist(), w.columns.tolist(), w.block_ids.tolist(), strict=True)) for w in writes] == [
        [(2, 0, 7), (2, 1, 9)],
        [(2, 2, 4)],
        [],
    ]
