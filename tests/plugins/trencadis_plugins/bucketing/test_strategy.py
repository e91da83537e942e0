from __future__ import annotations

import logging

import attrs
import pytest

from support.strategies.bucket_cases import SMALL
from trencadis.errors import ConfigValueError
from trencadis.records import Bucket, Phase, Shape
from trencadis_plugins.bucketing.strategy import TableStrategy, or_largest

LIMITS = attrs.evolve(SMALL, block_size=16, max_model_len=100, max_num_batched_tokens=64, num_blocks=20)


class Listed(TableStrategy):
    def __init__(self, table, limits=LIMITS):
        self.listed = table
        super().__init__(limits)

    def buckets(self, limits):
        return self.listed


def test_prepared_bucket_is_used_where_one_covers_and_a_fallback_elsewhere():
    strategy = Listed((Bucket(1, 32, 2), Bucket(4, 1, 8, Phase.DECODE)))
    assert strategy.bucket_for(Shape(1, 20, 1)) == Bucket(1, 32, 2)
    assert strategy.bucket_for(Shape(3, 1, 5, Phase.DECODE)) == Bucket(4, 1, 8, Phase.DECODE)
    assert strategy.bucket_for(Shape(1, 33, 1)) == Bucket(1, 64, 1)


def test_what_was_prepared_is_said_once_for_each_phase(caplog):
    with caplog.at_level(logging.INFO):
        strategy = Listed((Bucket(1, 32, 0), Bucket(1, 64, 2), Bucket(4, 1, 8, Phase.DECODE)))
        strategy.bucket_for(Shape(1, 1, 0))
    assert caplog.messages == [
        "Generated 2 prompt buckets [bs, query, num_blocks]: [(1, 32, 0), (1, 64, 2)]",
        "Generated 1 decode buckets [bs, query, num_blocks]: [(4, 1, 8)]",
    ]


def test_long_table_is_said_without_its_middle(caplog):
    with caplog.at_level(logging.INFO):
        Listed(tuple(Bucket(1, 1, count, Phase.DECODE) for count in range(1, 1001)))
    message = caplog.messages[1]
    assert message.startswith("Generated 1000 decode buckets [bs, query, num_blocks]: [(1, 1, 1), (1, 1, 2), ")
    assert message.endswith(", (1, 1, 999), (1, 1, 1000)]")
    assert ", (1, 1, 128), ..., (1, 1, 873), " in message


def test_phase_with_buckets_stays_as_it_is():
    buckets = [Bucket(1, 8, 0)]
    assert or_largest(buckets, LIMITS, Phase.PREFILL) == tuple(buckets)
    assert or_largest(buckets, LIMITS, Phase.PREFILL, table="bucketing.linear") == tuple(buckets)


def test_empty_phase_gets_its_largest_pass():
    assert or_largest([], LIMITS, Phase.PREFILL) == (Bucket(1, 64, 0),)
    assert or_largest([], attrs.evolve(LIMITS, max_model_len=40), Phase.PREFILL) == (Bucket(1, 40, 0),)
    assert or_largest([], LIMITS, Phase.DECODE) == (Bucket(4, 1, 28, Phase.DECODE),)
    contiguous = attrs.evolve(LIMITS, contiguous=True)
    assert or_largest([], contiguous, Phase.DECODE) == (Bucket(4, 1, 20, Phase.DECODE),)


def test_phase_emptied_by_a_config_table_is_refused_with_the_limits():
    with pytest.raises(
        ConfigValueError, match=r"\[bucketing.linear\] leaves no decode bucket.*max_num_seqs = 4.*Lower"
    ):
        or_largest([], LIMITS, Phase.DECODE, table="bucketing.linear")
