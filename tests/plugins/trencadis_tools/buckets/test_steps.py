from __future__ import annotations

import math
import random

import attrs
import pytest

from trencadis.records import Phase, Shape
from trencadis_gallery.bucketing.workloads import DeviceCost
from trencadis_gallery.bucketing.workloads.steps import simulate_steps
from trencadis_gallery.bucketing.workloads.trace import Arrival

COST = DeviceCost()


def simulate(limits, *arrivals):
    return simulate_steps(arrivals, limits, COST)


def decode(batch_size, num_blocks, query_len=1):
    return Shape(batch_size, query_len, num_blocks, Phase.DECODE)


def test_one_request_is_one_prefill_and_a_decode_for_each_further_token(limits):
    # 7 prompt tokens: the second output token reads 8 tokens = 2 blocks, the third 9 tokens = 3 blocks.
    assert simulate(limits, Arrival(0.0, 7, 3)) == {Shape(1, 7, 0): (1, 7), decode(1, 2): (1, 1), decode(1, 3): (1, 1)}


def test_single_output_token_needs_no_decode(limits):
    assert simulate(limits, Arrival(0.0, 5, 1)) == {Shape(1, 5, 0): (1, 5)}


def test_long_prompt_is_computed_in_chunks_of_the_token_budget(limits):
    counts = simulate(limits, Arrival(0.0, 30, 1))
    assert counts == {Shape(1, 16, 0): (1, 16), Shape(1, 14, 4): (1, 14)}


def test_sequences_that_meet_decode_together(limits):
    counts = simulate(limits, Arrival(0.0, 4, 3), Arrival(0.0, 4, 3))
    assert counts[Shape(1, 4, 0)] == (2, 8)
    assert counts[decode(2, 4)] == (2, 4)


def test_prefills_share_a_pass_where_the_device_takes_several(limits):
    wide = attrs.evolve(limits, max_prefill_batch_size=2)
    counts = simulate(wide, Arrival(0.0, 6, 1), Arrival(0.0, 8, 1), Arrival(0.0, 2, 1))
    # 8 and 6 fill a rectangle of 16; the third goes alone.
    assert counts == {Shape(2, 8, 0): (1, 14), Shape(1, 2, 0): (1, 2)}


def test_distant_requests_never_meet(limits):
    counts = simulate(limits, Arrival(0.0, 4, 4), Arrival(1e6, 4, 4))
    assert {shape.batch_size for shape in counts} == {1}


def test_no_more_sequences_run_than_there_is_room_for(limits):
    few = attrs.evolve(limits, max_num_seqs=2)
    crowd = [Arrival(0.0, 4, 6)] * 9
    assert max(shape.batch_size for shape in simulate(few, *crowd)) == 2
    small = attrs.evolve(limits, num_blocks=6)  # each takes 3 blocks
    assert max(shape.batch_size for shape in simulate(small, *crowd)) == 2


def test_request_larger_than_the_cache_runs_alone(limits):
    tiny = attrs.evolve(limits, num_blocks=2)
    counts = simulate(tiny, Arrival(0.0, 12, 2), Arrival(0.0, 4, 2))
    assert counts[decode(1, 4)] == (1, 1)
    assert {shape.batch_size for shape in counts} == {1}


def test_lengths_are_cut_to_the_longest_sequence(limits):
    counts = simulate(limits, Arrival(0.0, 100, 100), Arrival(1e6, 30, 100))
    assert max(shape.num_blocks for shape in counts) == 8
    # 31 prompt tokens leave one output token, which no decode computes; 30 leave a second.
    assert sum(count for shape, (count, _) in counts.items() if shape.phase is Phase.DECODE) == 1


def test_drafts_lengthen_every_decode(limits):
    drafting = attrs.evolve(limits, max_draft_tokens=3)
    counts = simulate(drafting, Arrival(0.0, 4, 2))
    assert counts[decode(1, 2, query_len=4)] == (1, 4)


@pytest.mark.parametrize("seed", range(8))
def test_running_counts_equal_a_simulation_of_each_sequence(limits, seed):
    """The slow reference: lengths of all sequences written out, one after the other."""
    rng = random.Random(seed)
    case = attrs.evolve(
        limits,
        max_num_seqs=rng.randint(1, 4),
        max_prefill_batch_size=rng.randint(1, 3),
        block_size=rng.choice([1, 3, 4]),
        num_blocks=rng.choice([12, 40, 200]),
    )
    now_s = 0.0
    arrivals = []
    for _ in range(40):
        now_s += rng.expovariate(60)
        arrivals.append(Arrival(now_s, rng.randint(1, 40), rng.randint(1, 12)))
    assert simulate_steps(arrivals, case, COST) == _slowly(arrivals, case)


def _slowly(arrivals, limits):
    waiting, running, now_s = list(arrivals), [], 0.0
    found: dict[Shape, list[int]] = {}

    def run(shape, tokens):
        found.setdefault(shape, [0, 0])
        found[shape][0] += 1
        found[shape][1] += tokens
        return COST.pass_s(shape)

    while waiting or running:
        if not running:
            now_s = max(now_s, waiting[0].arrival_s)
        while waiting and waiting[0].arrival_s <= now_s and len(running) < limits.max_num_seqs:
            prompt = min(waiting[0].num_prompt_tokens, limits.max_model_len - 1)
            output = min(waiting[0].num_output_tokens, limits.max_model_len - prompt)
            blocks = math.ceil((prompt + output) / limits.block_size)
            if running and blocks + sum(item["blocks"] for item in running) > limits.num_blocks:
                break
            waiting.pop(0)
            running.append({"prompt": prompt, "total": prompt + output, "computed": 0, "blocks": blocks})
        step_s = COST.step_s
        decoding = [item for item in running if item["computed"] >= item["prompt"]]
        if decoding:
            read = sum(math.ceil((item["computed"] + 1) / limits.block_size) for item in decoding)
            step_s += run(Shape(len(decoding), 1, read, Phase.DECODE), len(decoding))
        left = limits.max_num_batched_tokens - len(decoding)
        chunks = []
        for item in running:
            if item not in decoding and left > 0:
                chunks.append((min(left, item["prompt"] - item["computed"]), item))
                left -= chunks[-1][0]
        groups = []
        for chunk in sorted(chunks, key=lambda chunk: -chunk[0]):
            room = groups and len(groups[-1]) < limits.max_prefill_batch_size
            if room and (len(groups[-1]) + 1) * groups[-1][0][0] <= limits.max_num_batched_tokens:
                groups[-1].append(chunk)
            else:
                groups.append([chunk])
        for group in groups:
            context = max(math.ceil(item["computed"] / limits.block_size) for _, item in group)
            step_s += run(Shape(len(group), group[0][0], context), sum(size for size, _ in group))
        for item in decoding:
            item["computed"] += 1
        for size, item in chunks:
            item["computed"] += size
        # The last output token is never computed again.
        running = [
            item for item in running if item["computed"] < item["total"] - 1 or item["computed"] < item["prompt"]
        ]
        now_s += step_s
    return {shape: tuple(counts) for shape, counts in found.items()}
