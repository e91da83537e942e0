"""Ranks are lost in any step: every request goes on with the tokens that it has, and every text is what it would have been."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.core.invariants import broken_invariants
from trencadis.errors import BackendError, RanksLostError
from trencadis.interfaces import AllocationPlan, KVWorkerSide, PendingStep
from trencadis.records import Batch, EmbeddingRequest, FinishReason, Request, SamplingParams, StepOutput
from trencadis_testing.doubles import LoopConnector, _LoopWorker
from trencadis_testing.engines import make_engine
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend, fake_text


class Lossy(FakeExecutor):
    """Loses its backend, KV and all, at some of its calls; a new one takes its place at the restart.

    Args:
        losses: At which calls of ``submit`` and ``embed``, counted from 0.
        deadly: Whether a batch ends the ranks, too.
    """

    def __init__(self, losses: Collection[int] = (), deadly: Callable[[Batch], bool] = lambda batch: False) -> None:
        super().__init__(_backend())
        self.num_restarts = 0
        self.can_restart = True
        self.remake_worker: Callable[[], KVWorkerSide] | None = None
        self._losses, self._deadly = set(losses), deadly
        self._num_calls = 0
        self._is_lost = False

    def allocate(self, plan: AllocationPlan) -> None:
        self._plan = plan
        super().allocate(plan)

    def _may_lose(self, *, is_deadly: bool = False) -> None:
        if self._num_calls in self._losses or is_deadly:
            self._is_lost = True
        self._num_calls += 1
        if self._is_lost:
            raise RanksLostError("The ranks were lost: rank 0 is gone.")

    def submit(self, batch: Batch) -> PendingStep:
        try:
            self._may_lose(is_deadly=self._deadly(batch))
        except RanksLostError as error:
            return _Lost(error)
        return super().submit(batch)

    def embed(self, token_ids: Sequence[Any]) -> Any:
        self._may_lose()
        return super().embed(token_ids)

    def restart(self) -> None:
        if not self.can_restart:
            raise BackendError("lost too often")
        self._is_lost = False
        self.num_restarts += 1
        self.backend = _backend()
        if self.remake_worker is not None:
            self._plan = attrs.evolve(self._plan, connector=self.remake_worker())
        super().allocate(self._plan)


class _Lost:
    def __init__(self, error: RanksLostError) -> None:
        self._error = error

    def wait(self) -> StepOutput:
        raise self._error


def _backend() -> FakeBackend:
    return FakeBackend(eos=-1, max_model_len=120)


PROMPTS = {
    "a": (1, 2, 3),
    "b": tuple(range(20, 40)),
    "c": (1, 2, 3, 4, 5, 6, 7, 8),
    "d": tuple(range(1, 30)),
    "e": (9,),
}
TEXTS = {"x": (3, 4), "y": (5,)}


def serve(executor: FakeExecutor, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    engine = make_engine(executor=executor, max_num_seqs=3, max_num_batched_tokens=24, **options)
    for name, prompt in PROMPTS.items():
        engine.add(Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(max_tokens=14)))
    for name, tokens in TEXTS.items():
        engine.take(EmbeddingRequest(request_id=name, token_ids=tokens))
    ended, embedded = {}, {}
    for _ in range(600):
        if not engine.has_work:
            break
        deltas = engine.step()
        assert broken_invariants(engine) == []
        ended.update((one.request_id, one) for one in deltas.finished)
        embedded.update((one.request_id, one) for one in deltas.embeddings)
    assert not engine.has_work
    engine.close()
    return ended, embedded


@settings(max_examples=40)
@example(  # one that was preempted waits for its last token, which is lost
    losses={0, 50},
    num_blocks=18,
    shape={"delay": 1, "pending": 0, "holds": False, "by_layer": False, "fail": lambda _: None},
    overlap=True,
    caches=False,
)
@given(
    losses=st.sets(st.integers(0, 80), max_size=2),
    num_blocks=st.sampled_from([18, 24, 60]),
    shape=st.fixed_dictionaries(
        {
            "delay": st.integers(1, 4),
            "pending": st.integers(0, 2),
            "holds": st.booleans(),
            "by_layer": st.booleans(),
            "fail": st.sampled_from([lambda _: None, lambda transfer_id: 4 if transfer_id % 3 == 1 else None]),
        }
    ),
    overlap=st.booleans(),
    caches=st.booleans(),
)
def test_loads_and_saves_that_are_under_way_end_with_the_ranks_and_cost_no_request(
    losses, num_blocks, shape, overlap, caches
):
    """No clock runs here: what waited for a report of ranks that are gone would wait for ever."""
    connector = LoopConnector(**shape)
    executor = Lossy(losses)
    executor.remake_worker = lambda: _LoopWorker(connector.store, 4)
    engine = make_engine(
        executor=executor,
        connector=connector.pair(),
        max_num_seqs=3,
        max_num_batched_tokens=24,
        num_blocks=num_blocks,
        async_scheduling=overlap,
        prefix_caching=caches,
    )
    ended = {}
    for wave in range(2):
        for name, prompt in PROMPTS.items():
            params = SamplingParams(max_tokens=14)
            engine.add(Request(request_id=f"{name} {wave}", prompt_token_ids=prompt, params=params))
        for _ in range(600):
            if not engine.has_work:
                break
            ended.update((one.request_id, one) for one in engine.step().finished)
            assert broken_invariants(engine) == []
        assert not engine.has_work
    inside = engine.inspect()
    engine.close()
    assert not inside.stages["transfer"].loads
    assert not inside.stages["transfer"].pinned
    found = {name: (one.token_ids.tolist(), one.error) for name, one in ended.items()}
    expected = {
        f"{name} {wave}": fake_text(prompt, 14, eos=-1) for name, prompt in PROMPTS.items() for wave in range(2)
    }
    assert found == {name: (text, "") for name, text in expected.items()}
    assert engine.totals.num_failed_steps <= executor.num_restarts, "a sequence read what is not its own"
    if not losses and not caches:
        assert connector.scheduler.num_loaded


def test_the_request_that_is_in_every_lost_step_ends_after_three_and_no_other_does():
    executor = Lossy(deadly=lambda batch: any(start.token_ids[0] == 9 for start in batch.row_starts))
    ended, _ = serve(executor, num_blocks=60)
    assert ended["e"].finish_reason is FinishReason.ERROR
    assert "rank 0 is gone" in ended["e"].error
    assert executor.num_restarts == 3
    assert all(
        one.token_ids.tolist() == fake_text(PROMPTS[name], 14, eos=-1) for name, one in ended.items() if name != "e"
    )


def test_a_text_that_is_in_every_loss_fails_after_three_and_no_other_does():
    executor = Lossy(losses=range(9))
    engine = make_engine(executor=executor, num_blocks=60)
    for name, tokens in TEXTS.items():
        engine.take(EmbeddingRequest(request_id=name, token_ids=tokens))
    embedded = []
    while engine.has_work and len(embedded) < 2:
        embedded += engine.step().embeddings
        if embedded:
            executor._losses.clear()
    assert [(one.request_id, bool(one.error)) for one in embedded] == [("x", True), ("y", False)]


def test_an_engine_whose_ranks_cannot_be_started_has_failed():
    executor = Lossy(losses={2})
    executor.can_restart = False
    with pytest.raises(BackendError, match="lost too often"):
        serve(executor, num_blocks=60)


def test_an_executor_that_cannot_restart_says_so():
    class NoRestart(Lossy):
        restart = None

    with pytest.raises(BackendError, match=r"has no restart\(\)"):
        serve(NoRestart(losses={2}), num_blocks=60)
