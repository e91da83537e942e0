from __future__ import annotations

import pytest

from trencadis.records import Phase, Shape
from trencadis_gallery.bucketing.workloads import DeviceCost
from trencadis_plugins.bucketing.strategy import padded_cost

COST = DeviceCost(token_s=2.0, block_s=3.0, prefill_graph_bytes=5.0, decode_graph_bytes=7.0)


def test_prefill_time_doubles_with_128_blocks_of_context():
    assert COST.pass_s(Shape(2, 10, 0)) == 2 * 10 * 2.0
    assert COST.pass_s(Shape(2, 10, 128)) == 2 * COST.pass_s(Shape(2, 10, 0))


def test_decode_time_counts_blocks_and_three_for_each_row():
    assert COST.pass_s(Shape(4, 1, 10, Phase.DECODE)) == (10 + 3 * 4) * 3.0
    assert COST.pass_s(Shape(4, 2, 10, Phase.DECODE)) == (10 + 3 * 8) * 3.0


def test_graph_memory_follows_tokens_in_prefill_only():
    assert COST.graph_bytes(Shape(2, 10, 99)) == 2 * 10 * 5.0
    assert COST.graph_bytes(Shape(64, 1, 999, Phase.DECODE)) == 7.0


def test_decode_steps_last_as_in_their_source():
    cost = DeviceCost()
    # 8 ms + 20 µs a sequence + 7 µs a block; a sequence is taken as three blocks.
    ours = cost.step_s + cost.pass_s(Shape(64, 1, 1000, Phase.DECODE))
    assert ours == pytest.approx(0.008 + 64 * 20e-6 + 1000 * 7e-6, rel=0.01)


@pytest.mark.parametrize("phase", Phase)
def test_order_of_shapes_is_that_of_the_cost_that_look_up_minimises(phase):
    shapes = [Shape(b, q, n, phase) for b in (1, 3, 8) for q in (1, 5, 128) for n in (1, 64, 500)]
    ratios = {round(DeviceCost().pass_s(shape) / padded_cost(shape), 15) for shape in shapes}
    assert len(ratios) == 1


def test_constants_are_positive():
    with pytest.raises(ValueError, match="compile_s"):
        DeviceCost(compile_s=0.0)
