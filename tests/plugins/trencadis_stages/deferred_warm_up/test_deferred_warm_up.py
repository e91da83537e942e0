"""An engine whose backend puts off a part of the warm-up."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from trencadis.errors import ContractError, OutOfMemoryError, RanksLostError
from trencadis.interfaces import BucketingStrategy
from trencadis.records import Bucket, Phase, Request, SamplingParams, Shape, WarmUp, WarmUpReport
from trencadis_stages.deferred_warm_up.deferred_warm_up import DeferredWarmUp
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend


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


class Pairs(BucketingStrategy):
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
    engine = make_engine(backend=backend, bucketing=Pairs(), max_num_batched_tokens=64, max_num_seqs=2)
    backend.left = []
    assert 0 < engine.work_ahead() < 1


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


SMALL, MIDDLING, LARGE = (Bucket(1, 1, num_blocks, Phase.DECODE) for num_blocks in (4, 8, 16))


def bound(*prepared: Bucket, executor: object = None) -> tuple[DeferredWarmUp, SimpleNamespace, list[bool]]:
    """A stage of an engine that was to prepare three buckets and has prepared some, what it substitutes, and whether it took part."""
    stage, turns = DeferredWarmUp("the executor"), []
    report = WarmUpReport(prepared=prepared, num_deferred=3 - len(prepared))
    buckets = SimpleNamespace(ready=set(prepared), substitute=None, prepared=lambda more: buckets.ready.update(more))
    parts = SimpleNamespace(
        executor=executor or FakeExecutor(),
        warm_up=WarmUp(buckets=(SMALL, MIDDLING, LARGE), report=report),
        buckets=buckets,
        take_part=lambda _, is_on: turns.append(is_on),
    )
    stage.bind(parts)
    return stage, buckets, turns


def test_smallest_prepared_bucket_stands_in_for_one_that_is_prepared_later() -> None:
    ready = [(), (MIDDLING,), (SMALL,)]
    executor = SimpleNamespace(warm_up_rest=lambda *, is_idle: ready.pop(0))
    stage, buckets, turns = bound(LARGE, executor=executor)
    found = []
    for _ in range(2):
        stage.received(None, None)
        found.append(buckets.substitute(Shape(1, 1, 3, Phase.DECODE), SMALL))
    assert found == [LARGE, MIDDLING]
    assert buckets.substitute(Shape(1, 1, 7, Phase.DECODE), MIDDLING) == MIDDLING
    stage.received(None, None)
    assert (buckets.substitute, turns, ready) == (None, [True, False], []), "it is called no more when all are ready"


def test_bucket_that_nothing_can_stand_in_for_is_its_own() -> None:
    _, buckets, _ = bound(SMALL)
    assert buckets.substitute(Shape(1, 1, 12, Phase.DECODE), LARGE) == LARGE


def test_stage_without_anything_put_off_takes_no_part() -> None:
    stage, buckets, turns = bound(SMALL, MIDDLING, LARGE)
    assert (buckets.substitute, turns, stage.idle()) == (None, [False], None)
    assert make_engine()._stages.idle == ()
    engine = make_engine(backend=FakeBackend(layout="padded"), bucketing=Pairs(), max_num_batched_tokens=64)
    assert engine._stages.received == ()


def test_executor_that_cannot_prepare_what_it_put_off_is_named() -> None:
    said = r"the executor put off 3 buckets in warm_up\(\), and has no warm_up_rest\(\)"
    with pytest.raises(ContractError, match=said):
        bound(executor=object())
