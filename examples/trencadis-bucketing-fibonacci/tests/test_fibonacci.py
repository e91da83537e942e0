from __future__ import annotations

import attrs
import pytest
from trencadis.records import Bucket, Phase, Shape
from trencadis_testing import BucketingConformance
from trencadis_testing.bucketing import SAMPLE_LIMITS

from trencadis_bucketing_fibonacci.config import FibonacciConfig
from trencadis_bucketing_fibonacci.fibonacci import Fibonacci, fibonacci_sizes


class TestFibonacci(BucketingConformance):
    make = Fibonacci


class TestFibonacciFromOneToken(BucketingConformance):
    def make(self, limits):
        return Fibonacci(limits, FibonacciConfig(smallest_query=1))


@pytest.mark.parametrize(
    ("largest", "smallest", "sizes"),
    [
        (1, 1, [1]),
        (2, 1, [1, 2]),
        (13, 1, [1, 2, 3, 5, 8, 13]),
        (20, 1, [1, 2, 3, 5, 8, 13, 20]),
        (40, 8, [8, 13, 21, 34, 40]),
        (40, 10, [10, 13, 21, 34, 40]),
        (8, 8, [8]),
    ],
)
def test_sizes_are_fibonacci_numbers_and_the_largest_itself(largest, smallest, sizes) -> None:
    assert list(fibonacci_sizes(largest, smallest=smallest)) == sizes


def test_prompt_is_padded_to_the_next_fibonacci_number() -> None:
    limits = attrs.evolve(SAMPLE_LIMITS["long_context"], max_num_seqs=9)
    strategy = Fibonacci(limits)
    assert strategy.bucket_for(Shape(1, 3, 0)) == Bucket(1, 8, 0)
    assert strategy.bucket_for(Shape(1, 200, 0)) == Bucket(1, 233, 0)
    assert strategy.bucket_for(Shape(6, 1, 100, Phase.DECODE)) == Bucket(8, 1, 144, Phase.DECODE)
