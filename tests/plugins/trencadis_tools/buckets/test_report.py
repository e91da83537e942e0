from __future__ import annotations

import pytest

from trencadis.interfaces import BucketingStrategy
from trencadis.records import Bucket, Phase, Shape
from trencadis_gallery.bucketing.workloads import DeviceCost, Passes, Workload
from trencadis_tools.buckets import measure

COST = DeviceCost(
    step_s=1.0, token_s=1.0, block_s=1.0, compile_s=2.0, prefill_graph_bytes=10.0, decode_graph_bytes=100.0
)


class TwoBuckets(BucketingStrategy):
    table = (Bucket(1, 8, 0), Bucket(2, 1, 4, Phase.DECODE))

    def buckets(self, limits):
        return self.table

    def bucket_for(self, shape):
        return next((bucket for bucket in self.table if bucket.covers(shape)), Bucket.of(shape))


def workload(*passes):
    return Workload(tuple(passes))


def test_table_costs_its_buckets(limits):
    report = measure(TwoBuckets(), limits, COST)
    assert report.buckets == TwoBuckets.table
    assert report.warmup_s == 4.0
    assert report.graph_bytes == 8 * 10.0 + 100.0
    assert report.prompt_padding is None
    assert report.num_unprepared is None


def test_phases_are_listed_apart(limits):
    report = measure(TwoBuckets(), limits, COST)
    assert report.of_phase(Phase.PREFILL) == [Bucket(1, 8, 0)]


def test_padding_is_what_is_computed_beyond_what_was_asked_for(limits):
    ran = workload(
        Passes(Shape(1, 6, 0), 3, 18), Passes(Shape(1, 8, 0), 1, 8), Passes(Shape(1, 1, 3, Phase.DECODE), 2, 2)
    )
    report = measure(TwoBuckets(), limits, COST, ran)
    assert report.prompt_padding == pytest.approx(4 * 8 / 26 - 1)
    assert report.decode_padding == pytest.approx(4 / 3 - 1)
    own_s = 3 * (1 + 6) + (1 + 8) + 2 * (1 + 3 + 3)
    padded_s = 4 * (1 + 8) + 2 * (1 + 4 + 6)
    assert report.time_padding == pytest.approx(padded_s / own_s - 1)
    assert (report.num_unprepared, report.num_fallbacks) == (0, 0)


def test_shorter_queries_of_a_batch_count_as_padding(limits):
    report = measure(TwoBuckets(), limits, COST, workload(Passes(Shape(1, 8, 0), 1, 4)))
    assert report.prompt_padding == 1.0


def test_passes_that_nothing_is_prepared_for_are_counted(limits):
    ran = workload(Passes(Shape(1, 9, 0), 5, 45), Passes(Shape(1, 10, 0), 1, 10), Passes(Shape(1, 8, 0), 1, 8))
    report = measure(TwoBuckets(), limits, COST, ran)
    assert (report.num_unprepared, report.num_fallbacks) == (6, 2)


def test_empty_workload_has_no_padding(limits):
    report = measure(TwoBuckets(), limits, COST, workload())
    assert (report.prompt_padding, report.decode_padding, report.time_padding) == (0.0, 0.0, 0.0)
