from __future__ import annotations

import attrs
import numpy as np
import pytest

from trencadis.errors import ConfigError, PluginError, StepFailedError
from trencadis.interfaces import SchedulerView, SchedulingPolicy
from trencadis.records import StepTime
from trencadis_tools.bench.schedule import ScheduleWorkload, measure_schedule
from trencadis_tools.workloads import Workload, WorkloadRequest
from trencadis_tools.workloads.arrivals import stretch

STEP_TIME = StepTime(base_s=0.02, token_s=0.0001, context_token_s=0.0)
POLICIES = "tests.plugins.trencadis_tools.bench.test_schedule"


@pytest.fixture
def measure(fake_house):
    """``measure(arrivals, policy, **workload)``."""

    def run(arrivals, policy="trencadis_testing.engines:ServeInOrder", *, step_time=STEP_TIME, **workload):
        config, registry = fake_house()
        sizes = {"num_tenants": 2, "num_priorities": 2, **workload}
        config = attrs.evolve(config, engine=attrs.evolve(config.engine, max_num_seqs=4, max_num_batched_tokens=256))
        taken = ScheduleWorkload(**sizes)
        workload = arrivals if isinstance(arrivals, Workload) else recorded(arrivals, taken.rate, taken.limit)
        return measure_schedule(config, registry, taken.complete(workload), policy=policy, step_time=step_time)

    return run


Arrival = tuple[float, int, int]
"""Time, prompt tokens, output tokens."""


def recorded(arrivals: list[Arrival], rate: float = 0.0, limit: int = 1000, **more) -> Workload:
    factor = stretch([arrival[0] for arrival in arrivals], rate)
    requests = [
        WorkloadRequest(
            request_id=f"r{index}",
            arrival_s=arrival_s * factor,
            num_prompt_tokens=num_prompt,
            num_output_tokens=num_output,
        )
        for index, (arrival_s, num_prompt, num_output) in enumerate(arrivals[:limit])
    ]
    return Workload(name="recorded", requests=tuple(requests), **more)


def burst(num_requests: int = 20) -> list[Arrival]:
    """Every other prompt is short; all come within two seconds."""
    return [(i * 0.1, 20 if i % 2 else 200, 5 + i % 7) for i in range(num_requests)]


class PromptsByLength(SchedulingPolicy):
    def order(self, view: SchedulerView):
        return view.waiting[np.argsort(view.num_tokens[view.waiting], kind="stable")]


class Careless(SchedulingPolicy):
    def order(self, view: SchedulerView):
        return view.waiting[:-1]


class Mute(SchedulingPolicy):
    def admit(self, request, *, num_waiting, num_waiting_tokens):
        return None


class Peeks(SchedulingPolicy):
    """Looks for a true length in all that it is shown."""

    seen: set[int]

    def __init__(self) -> None:
        type(self).seen = set()

    def on_added(self, *, slot, request):
        type(self).seen.add(request.params.max_tokens)


class Refuses(SchedulingPolicy):
    def admit(self, request, *, num_waiting, num_waiting_tokens):
        return "a long prompt" if len(request.prompt_token_ids) > 100 else ""


def test_one_request_alone_takes_what_the_model_of_step_times_says(measure) -> None:
    result = measure([(0.0, 100, 11)])
    assert result.ttft_mean_s == result.ttft_p99_s == pytest.approx(0.03)
    assert result.tpot_mean_s == pytest.approx(0.0201)
    assert result.e2e_mean_s == pytest.approx(0.03 + 10 * 0.0201)
    assert (result.num_requests, result.num_preempted, result.recompute_ratio) == (1, 0, 0.0)


def test_the_same_workload_gives_the_same_result_and_another_seed_other_tenants(measure) -> None:
    first = measure(burst())
    assert measure(burst()) == first
    assert measure(burst(), seed=1) != first


def test_policies_differ_in_latency_and_not_in_work(measure) -> None:
    in_order = measure(burst(), rate=200.0)
    by_length = measure(burst(), f"{POLICIES}:PromptsByLength", rate=200.0)
    assert by_length.ttft_mean_s < in_order.ttft_mean_s
    assert by_length.num_requests == in_order.num_requests == 20


def test_a_rate_stretches_the_trace_and_a_limit_cuts_it(measure) -> None:
    calm = measure(burst(), rate=1.0)
    assert calm.duration_s > 19.0
    assert calm.ttft_p99_s < measure(burst()).ttft_p99_s
    assert measure(burst(), limit=3).num_requests == 3


def test_a_short_cache_costs_preemptions_and_their_recompute_tax(measure, fake_house) -> None:
    config, registry = fake_house()
    config = attrs.evolve(config, cache=attrs.evolve(config.cache, num_blocks=60, prefix_caching=False))
    arrivals = [(0.0, 30, 80)] * 6
    result = measure_schedule(config, registry, recorded(arrivals), policy="trencadis_testing.engines:ServeInOrder")
    assert result.num_preempted > 0
    assert 0 < result.recompute_ratio < 1
    assert result.num_requests == 6


def test_what_can_never_fit_or_is_refused_is_counted(measure, fake_house) -> None:
    assert measure(burst(), f"{POLICIES}:Refuses").num_refused == 10
    config, registry = fake_house()
    config = attrs.evolve(config, cache=attrs.evolve(config.cache, num_blocks=20, block_size=4))
    arrivals = [(0.0, 100, 2), (0.0, 10, 2)]
    result = measure_schedule(config, registry, recorded(arrivals), policy="trencadis_testing.engines:ServeInOrder")
    assert (result.num_refused, result.num_requests) == (1, 1)


def test_a_policy_sees_one_limit_for_all_and_no_true_length(measure) -> None:
    measure(burst(), f"{POLICIES}:Peeks")
    assert Peeks.seen == {11}


def test_tenants_prompts_share_their_beginning_if_asked_to(measure) -> None:
    assert measure(burst()).prefix_hit_ratio == 0
    assert measure(burst(), shared_prefix=12).prefix_hit_ratio > 0


def test_a_policy_that_breaks_its_contract_is_no_result(measure) -> None:
    with pytest.raises(StepFailedError, match=r"order\(\) returned"):
        measure(burst(), f"{POLICIES}:Careless")
    with pytest.raises(StepFailedError, match=r"admit\(\) returned None"):
        measure(burst(), f"{POLICIES}:Mute")


def test_an_unknown_policy_is_refused_in_words(measure) -> None:
    with pytest.raises(PluginError, match="no such component"):
        measure(burst(), "fastest")


def test_goodput_falls_with_tighter_targets(measure) -> None:
    loose = measure(burst(), ttft_target_s=100.0, tpot_target_s=10.0)
    tight = measure(burst(), ttft_target_s=0.05, tpot_target_s=10.0)
    assert loose.goodput == pytest.approx(20 / loose.duration_s)
    assert 0 < tight.goodput < loose.goodput


def test_what_a_workload_tells_counts_and_what_it_lacks_is_drawn(measure) -> None:
    asked = recorded(burst()).requests
    told = Workload(
        name="told",
        requests=tuple(
            attrs.evolve(
                one, tenant=f"team {index % 3}", priority=index % 2, ttft_target_s=0.001, block_ids=(index % 2,)
            )
            for index, one in enumerate(asked)
        ),
        block_tokens=16,
    )
    complete = ScheduleWorkload().complete(told)
    assert [one.tpot_target_s for one in complete.requests] == [0.1] * 20
    assert [attrs.evolve(one, tpot_target_s=float("inf")) for one in complete.requests] == list(told.requests)
    result = measure(told)
    assert result.prefix_hit_ratio > 0, "equal block ids are found in the prefix cache"
    assert result.goodput == 0, "no first token within a millisecond"
    assert result.urgent_ttft_p99_s > 0
    assert measure(attrs.evolve(told, requests=asked)).prefix_hit_ratio == 0


def test_prefixes_are_not_drawn_over_those_of_a_workload() -> None:
    told = recorded(burst())
    told = attrs.evolve(told, requests=tuple(attrs.evolve(one, block_ids=(1,)) for one in told.requests))
    with pytest.raises(ConfigError, match="tells what prompts share"):
        ScheduleWorkload(shared_prefix=16).complete(told)


def test_sessions_wait_for_their_answers(measure) -> None:
    first, second = recorded([(0.0, 100, 11), (0.0, 150, 2)]).requests
    chained = Workload(name="chained", requests=(first, attrs.evolve(second, after="r0", think_s=5.0)))
    result = measure(chained)
    # 27 blocks of 4 tokens are in the cache; one step more was begun before the end of the last text was seen.
    assert result.duration_s == pytest.approx(0.03 + 10 * 0.0201 + 5.0 + 0.02 + 0.0001 * (150 - 108) + 2 * 0.0201)
    assert result.ttft_mean_s < 0.04, "counted from when it was sent"
