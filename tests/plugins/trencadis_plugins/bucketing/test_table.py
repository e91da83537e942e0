from __future__ import annotations

import random

import attrs
import pytest

from support.strategies.bucket_cases import SMALL
from trencadis.errors import ConfigValueError
from trencadis.records import Bucket, Phase, Shape
from trencadis_plugins.bucketing.strategy import BucketTable, padded_cost


def test_empty_table_finds_nothing():
    assert BucketTable([]).find(Shape(1, 1, 0)) is None
    assert BucketTable([]).find(Shape(1, 1, 1, Phase.DECODE)) is None


@pytest.mark.parametrize("phase", Phase)
def test_find_equals_a_search_of_the_whole_table(phase):
    rng = random.Random(7)
    for _ in range(60):
        buckets = [
            Bucket(rng.randint(1, 5), rng.randint(1, 5), rng.randint(0, 5), phase) for _ in range(rng.randint(1, 12))
        ]
        table = BucketTable(buckets)
        for _ in range(30):
            shape = Shape(rng.randint(1, 6), rng.randint(1, 6), rng.randint(0, 6), phase)
            covering = [bucket for bucket in buckets if bucket.covers(shape)]
            expected = min(covering, key=lambda bucket: (padded_cost(bucket), bucket), default=None)
            assert table.find(shape) == expected


def test_look_up_is_three_bisections_whatever_the_size_of_the_table(monkeypatch):
    """Counted, not timed: a look-up compares no bucket and makes none."""
    sizes = range(1, 41)
    table = BucketTable([Bucket(i, j, k) for i in sizes for j in sizes for k in sizes])
    monkeypatch.setattr(Bucket, "covers", None)
    monkeypatch.setattr("trencadis_plugins.bucketing.strategy.padded_cost", None)
    calls = []
    monkeypatch.setattr(
        "trencadis_plugins.bucketing.strategy.bisect_left",
        lambda axis, size: (
            calls.append(len(axis)) or next((i for i, item in enumerate(axis) if item >= size), len(axis))
        ),
    )
    assert table.find(Shape(7, 39, 40)) == Bucket(7, 39, 40)
    assert table.find(Shape(7, 41, 40)) is None
    assert calls == [40] * 6


def test_hundreds_of_buckets_without_a_common_size_are_looked_up():
    buckets = [Bucket(i, 1000 - i, i) for i in range(1, 201)]
    assert BucketTable(buckets).find(Shape(150, 850, 1)) == Bucket(150, 850, 150)
    assert BucketTable(buckets).find(Shape(150, 851, 1)) is None


def test_table_without_common_sizes_that_is_too_large_is_refused():
    buckets = [Bucket(i, 1000 - i, i) for i in range(1, 301)]
    with pytest.raises(
        ConfigValueError, match=r"300 prefill buckets have 300 values of batch_size.*Use fewer different sizes"
    ):
        BucketTable(buckets)


@pytest.mark.parametrize(("length", "blocks"), [(1, 0), (2, 1), (129, 1), (130, 2), (4096, 32)])
def test_context_is_all_but_one_token_rounded_up_to_blocks(length, blocks):
    assert attrs.evolve(SMALL, max_model_len=length).max_context_blocks == blocks


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("dimension", ["batch_size", "query_len", "num_blocks"])
def test_cost_grows_with_every_dimension(phase, dimension):
    shape = Shape(3, 5, 7, phase)
    assert padded_cost(attrs.evolve(shape, **{dimension: getattr(shape, dimension) + 1})) > padded_cost(shape)


def test_cost_of_a_token_doubles_at_128_blocks_of_context():
    assert padded_cost(Shape(2, 64, 128)) == 2 * padded_cost(Shape(2, 64, 0))


def test_cost_of_a_decode_row_is_that_of_three_blocks():
    assert padded_cost(Shape(5, 1, 40, Phase.DECODE)) == padded_cost(Shape(4, 1, 43, Phase.DECODE))
