from __future__ import annotations

import logging

import pytest

from trencadis.clock import SimulatedClock
from trencadis.engine.batching.passes import PassPlanner
from trencadis.engine.batching.warmup import BackgroundWarmUp, WarmUp, warm_up
from trencadis.errors import OutOfMemoryError, RanksLostError
from trencadis.interfaces import BucketingStrategy
from trencadis.records import Bucket, Phase, Request, SamplingParams, WarmUpReport
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend

BUCKETS = (Bucket(1, 16, 0), Bucket(2, 16, 4), Bucket(4, 1, 8, Phase.DECODE))


class Table(BucketingStrategy):
    """Three buckets, and exact shapes for what they do not cover."""

    def buckets(self, limits):
        return BUCKETS

    def bucket_for(self, shape):
        return next((bucket for bucket in BUCKETS if bucket.covers(shape)), Bucket.of(shape))


class Selective(FakeBackend):
    """Leaves out what is larger than one sequence, and takes two seconds."""

    def __init__(self, clock, **options):
        super().__init__(layout="padded", **options)
        self._clock = clock

    def warm_up(self, buckets, *, progress=None):
        self._clock.advance(2)
        return WarmUpReport(
            prepared=tuple(bucket for bucket in buckets if bucket.batch_size == 1), num_graphs=1, num_compilations=3
        )


def hosted(backend):
    executor = FakeExecutor(backend)
    executor.start(make_backend=lambda _: backend, make_sampler=lambda _: None, source=None)
    return executor


def test_backend_prepares_every_bucket_largest_first_unless_it_knows_better() -> None:
    backend, seen = FakeBackend(layout="padded"), []
    found = warm_up(hosted(backend), BUCKETS, clock=SimulatedClock(), progress=lambda *done: seen.append(done))
    assert backend.prepared == sorted(BUCKETS, reverse=True)
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert (found.skipped, found.buckets, found.report.prepared) == ((), BUCKETS, BUCKETS)


def test_what_the_backend_leaves_out_is_reported_and_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    clock = SimulatedClock()
    with caplog.at_level(logging.INFO):
        found = warm_up(hosted(Selective(clock)), BUCKETS, clock=clock)
    assert found.skipped == BUCKETS[1:]
    assert (found.took_s, found.report.num_graphs, found.report.num_compilations) == (2.0, 1, 3)
    assert "Prepared 1 buckets in 2.0 s." in caplog.text
    assert "2 of 3 buckets are not prepared" in caplog.text


def test_nothing_is_asked_of_the_backend_for_an_empty_table() -> None:
    backend = FakeBackend(layout="padded")
    assert warm_up(hosted(backend), (), clock=SimulatedClock()) == WarmUp()
    assert backend.prepared == []


def test_engine_keeps_the_report_and_counts_buckets_that_were_left_out() -> None:
    clock = SimulatedClock()
    engine = make_engine(backend=Selective(clock, max_model_len=64), bucketing=Table(), clock=clock)
    assert engine.warm_up.skipped == BUCKETS[1:]
    assert make_engine(backend=FakeBackend(layout="padded"), bucketing=Table(), warmup=False).warm_up == WarmUp()
    assert make_engine().warm_up == WarmUp()


class Late(FakeBackend):
    """Prepares the buckets of several sequences first; the others when there is nothing to serve, or if told so behind steps."""

    def __init__(self, *, in_steps=False, fails=False, **options):
        super().__init__(**{"layout": "padded", "max_model_len": 64, **options})
        self.in_steps, self.fails = in_steps, fails
        self.left = []

    def warm_up(self, buckets, *, progress=None):
        ready = tuple(bucket for bucket in buckets if bucket.batch_size > 1)
        self.left = [bucket for bucket in buckets if bucket.batch_size == 1]
        return WarmUpReport(prepared=ready, num_deferred=len(self.left))

    def warm_up_rest(self, *, is_idle):
        if self.fails:
            raise OutOfMemoryError("none left")
        return (self.left.pop(),) if self.left and (is_idle or self.in_steps) else ()


DECODES = tuple(Bucket(batch_size, 1, 64, Phase.DECODE) for batch_size in (1, 2))
PROMPTS = tuple(Bucket(batch_size, 64, 16) for batch_size in (1, 2))


class Pairs(Table):
    """One sequence or two, of any length."""

    def buckets(self, limits):
        return PROMPTS + DECODES

    def bucket_for(self, shape):
        return next(bucket for bucket in PROMPTS + DECODES if bucket.covers(shape))


def serve(engine, name):
    params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0)
    engine.add(Request(request_id=name, prompt_token_ids=(1, 2, 3), params=params))
    return drain(engine)[name].token_ids.tolist()


def test_larger_buckets_serve_until_an_idle_engine_has_prepared_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = make_engine(backend=Late(), bucketing=Pairs(), max_num_batched_tokens=64, max_num_seqs=2)
    tokens = serve(engine, "a")
    assert engine.totals.num_substituted == engine.totals.num_steps > 0
    assert "2 of 4 buckets are prepared later." in caplog.text
    pauses = [engine.work_ahead() for _ in range(3)]
    assert pauses == [0.0, None, None]
    assert "Prepared 4 of 4 buckets." in caplog.text
    before = engine.totals.num_substituted
    assert serve(engine, "b") == tokens
    assert (engine.totals.num_substituted, engine.totals.num_unprepared) == (before, 0)
    assert engine.totals.num_bucket_hits == engine.totals.num_steps


def test_engine_with_requests_does_not_work_ahead() -> None:
    engine = make_engine(backend=Late(), bucketing=Pairs(), max_num_batched_tokens=64, max_num_seqs=2)
    engine.add(Request(request_id="a", prompt_token_ids=(1, 2, 3), params=SamplingParams(max_tokens=3)))
    assert engine.work_ahead() is None
    drain(engine)
    assert engine.work_ahead() == 0.0


def test_backend_may_use_a_share_of_steps() -> None:
    engine = make_engine(backend=Late(in_steps=True), bucketing=Pairs(), max_num_batched_tokens=64, max_num_seqs=2)
    serve(engine, "a")
    assert engine.work_ahead() is None
    assert engine.totals.num_substituted < engine.totals.num_steps


def test_backend_that_waits_is_asked_again_after_a_pause() -> None:
    backend = Late()
    passes = PassPlanner.__new__(PassPlanner)
    left, backend.left = backend.left, []
    warmed = WarmUp(buckets=BUCKETS, report=WarmUpReport(prepared=(), num_deferred=3))
    background = BackgroundWarmUp(hosted(backend), passes, warmed)
    assert 0 < background.while_idle() < 1
    assert left == []


def test_failure_to_prepare_the_rest_ends_that_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(backend=Late(fails=True), bucketing=Pairs(), max_num_batched_tokens=64, max_num_seqs=2)
    tokens = serve(engine, "a")
    assert engine.work_ahead() is None
    assert "2 buckets cannot be prepared; larger ones serve in their place." in caplog.text
    assert serve(engine, "b") == tokens
    assert engine.totals.num_unprepared == 0


class Lossy(FakeExecutor):
    """Loses its ranks once it is told to, and starts others that put off the same."""

    is_lost = False

    def allocate(self, plan):
        self.plan = plan
        super().allocate(plan)

    def warm_up(self, buckets, *, progress=None):
        self.buckets = buckets
        return super().warm_up(buckets, progress=progress)

    def submit(self, batch):
        if self.is_lost:
            raise RanksLostError("rank 0 is gone")
        assert {one.bucket for one in batch.passes} <= {*PROMPTS, *DECODES} - set(self.backend.left)
        return super().submit(batch)

    def restart(self):
        self.is_lost = False
        self.backend = Late()
        self.allocate(self.plan)
        self.warm_up(self.buckets)


@pytest.mark.parametrize("num_before", [0, 1, 3], ids=["none", "one", "all"])
def test_ranks_that_are_started_again_prepare_anew_what_was_put_off(num_before) -> None:
    executor = Lossy(Late())
    executor.start(make_backend=lambda _: executor.backend, make_sampler=lambda _: None, source=None)
    engine = make_engine(executor=executor, bucketing=Pairs(), max_num_batched_tokens=64, max_num_seqs=2)
    for _ in range(num_before):
        engine.work_ahead()
    executor.is_lost = True
    serve(engine, "a")
    substituted = engine.totals.num_substituted
    assert substituted > 0
    assert [engine.work_ahead() for _ in range(3)] == [0.0, None, None]
    assert executor.backend.left == []
    serve(engine, "b")
    assert (engine.totals.num_substituted, engine.totals.num_unprepared) == (substituted, 0)
