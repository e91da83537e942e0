"""Options by their declarations."""

from __future__ import annotations

from typing import Any

import pytest

from trencadis.records import Bucket, Phase
from trencadis_tools.compare.candidates import restored
from trencadis_tools.simulation.step_times import BucketStepTimes, LinearStepTimes
from trencadis_tools.tune.slo import parse_slo
from trencadis_tools.tune.space import Option, Space, ladder

TIMES = LinearStepTimes(base_s=0.005, token_s=2e-5, context_s=1e-7, host_base_s=0.001)
MODEL = {"step_ms": 6.0, "token_us": 20.0, "context_token_us": 0.1}


def space(given: dict[str, Any] | None = None, **more: Any) -> Space:
    candidate = restored("start", {"scheduling.name": "fcfs", **(given or {})})
    options = {"slo": parse_slo("ttft_p99=1s,itl_p99=80ms"), "step_times": TIMES, "shares": False, **more}
    return Space(candidate.config, candidate.registry, **options)


def option(found: Space, path: str) -> Option:
    return {one.path: one for one in found.options()}[path]


def test_a_ladder_has_powers_of_two_and_what_lies_halfway() -> None:
    assert ladder(128, 1024) == (128, 192, 256, 384, 512, 768, 1024)
    assert ladder(128, 256, 100, 0) == (100, 128, 192, 256)


def test_twice_and_half_come_first() -> None:
    assert option(space(), "engine.max_num_batched_tokens").others()[:4] == [4096, 1024, 8192, 512]
    assert option(space(), "scheduling.fcfs.max_prefill_tokens").others()[:3] == [8192, 4096, 2048]


def test_neighbours_of_ordered_values_lie_beside_them_and_of_others_are_all() -> None:
    assert option(space(), "engine.max_num_seqs").neighbours(256) == [192, 384]
    assert option(space(), "engine.preemption").neighbours("swap") == ["recompute"]


def test_a_boolean_has_both_values_and_a_choice_all_of_them() -> None:
    found = {one.path: one for one in space().options_of("priority")}
    assert found["scheduling.priority.preempt"].values == (False, True)
    assert set(found["scheduling.priority.victim"].values) == {
        "youngest",
        "least_computed",
        "cheapest",
        "lowest_priority",
    }
    assert found["scheduling.priority.preempt"].needs == {"scheduling.name": "priority"}


def test_a_number_is_tried_around_its_default_within_its_bounds() -> None:
    found = {one.path: one.values for one in space().options_of("multi_level")}
    assert found["scheduling.multi_level.starve_s"] == (5.0, 10.0, 20.0, 40.0, 80.0)
    assert found["scheduling.multi_level.num_levels"] == (1, 3, 6, 12, 24)


def test_numbers_of_sizes_of_buckets_are_tried_and_a_negative_default_is_not() -> None:
    found = {one.path: one.values for one in space(layout="padded").options()}
    few = space({"bucketing.name": "exponential", "bucketing.exponential.limit": 3}, layout="padded")
    assert option(few, "bucketing.exponential.limit").others() == [6, 12, 1, 0]
    assert found["bucketing.exponential.decode_block_limit"] == (0, 4, 6, 8, 12, 16)
    assert "exact" not in found["bucketing.name"]
    assert "bucketing.exponential.prompt_ctx_max" not in found


def test_options_of_a_policy_within_the_policy_are_those_in_force() -> None:
    fair = space({"scheduling.name": "fair_share"})
    assert fair.tables_in_force("fair_share") == ["fair_share", "fcfs"]
    assert {"scheduling.fair_share.output_price", "scheduling.fcfs.victim"} <= {one.path for one in fair.options()}


def test_a_policy_that_plans_by_step_times_is_told_those_measured_and_the_objectives() -> None:
    change = option(space(), "scheduling.name").change("deadline")
    told = {f"scheduling.deadline.{key}": value for key, value in MODEL.items()}
    targets = {"scheduling.deadline.ttft_target_ms": 1000.0, "scheduling.deadline.tpot_target_ms": 80.0}
    assert change == {
        "scheduling.name": "deadline",
        **targets,
        **{key: pytest.approx(value) for key, value in told.items()},
    }


def test_a_policy_is_told_the_slopes_of_buckets_as_well() -> None:
    times = BucketStepTimes(times_s={Bucket(1, 1, 64, Phase.DECODE): 0.02}, lines={Phase.DECODE: (0.0136, 0.0, 0.0001)})
    change = option(space(step_times=times), "scheduling.name").change("deadline")
    assert change["scheduling.deadline.step_ms"] == pytest.approx(13.6)
    assert change["scheduling.deadline.token_us"] == 0
    assert change["scheduling.deadline.context_token_us"] == pytest.approx(100 / 16)


def test_a_target_of_a_policy_is_tried_at_and_below_the_objective() -> None:
    target = option(space(), "scheduling.fcfs.tpot_target_ms")
    assert target.values == (0.0, 40.0, 60.0, 80.0)
    assert set(target.change(60.0)) == {"scheduling.fcfs.tpot_target_ms", *(f"scheduling.fcfs.{key}" for key in MODEL)}
    assert target.change(0.0) == {}


def test_what_others_make_meaningless_is_left_out() -> None:
    changes = {
        "scheduling.name": "priority",
        "scheduling.fcfs.victim": "cheapest",
        "cache.swap_bytes": 1,
        "engine.max_num_seqs": 8,
    }
    assert space().in_force(changes) == {"scheduling.name": "priority", "engine.max_num_seqs": 8}
    swapping = {"engine.preemption": "swap", "cache.swap_bytes": 1}
    assert space().in_force(swapping) == swapping


def test_what_is_kept_is_no_option() -> None:
    kept = [one.path for one in space(keep=("scheduling", "engine.max_num_seqs")).options()]
    assert kept == ["engine.max_num_batched_tokens", "engine.preemption", "cache.swap_bytes"]


def test_options_follow_workload_memory_replicas_and_layout() -> None:
    paths = {one.path for one in space().options()}
    more = space(shares=True, is_short_of_blocks=True, replicas=2, layout="padded")
    assert {one.path for one in more.options()} - paths >= {
        "eviction.name",
        "cache.memory_fraction",
        "router.name",
        "bucketing.name",
    }
    assert not {"eviction.name", "cache.memory_fraction", "router.name", "bucketing.name"} & paths


def test_draft_lengths_are_options_where_there_is_a_speculator() -> None:
    drafting = space({"speculation.name": "ngram", "speculation.ngram.max_draft_tokens": 5})
    assert option(drafting, "speculation.ngram.max_draft_tokens").values == (1, 2, 3, 4, 5, 6, 8, 12, 16)
    assert option(drafting, "speculation.name").values == ("ngram", "none")
    assert set(option(drafting, "draft_length.name").values) >= {"fixed", "goodput", "table"}
    changes = {"speculation.ngram.max_draft_tokens": 2, "draft_length.name": "goodput"}
    assert drafting.in_force(changes) == changes
    assert drafting.in_force({**changes, "speculation.name": "none"}) == {"speculation.name": "none"}
    assert not [one for one in space().options() if one.path.startswith(("speculation", "draft_length"))]
