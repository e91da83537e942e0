from __future__ import annotations

import logging

import pytest

from trencadis.clock import SimulatedClock
from trencadis.engine.batching.warmup import warm_up
from trencadis.interfaces import BucketingStrategy
from trencadis.records import Bucket, Phase, WarmUp, WarmUpReport
from trencadis_testing.engines import make_engine
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
