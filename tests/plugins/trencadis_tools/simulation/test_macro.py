from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.simulation import BLOCK_TOKENS, STEP_TIMES, config_of, mixed
from trencadis.errors import CapabilityError
from trencadis_tools.simulation import ReplicaEvent, simulate
from trencadis_tools.simulation.macro import MacroEngine, check_macro, simulate_macro
from trencadis_tools.workloads import Workload


def covered(num_blocks=128, **engine):
    """Tables of a configuration that the macro replica covers."""
    return {
        "scheduling": {"name": "fcfs"},
        "engine": {"max_num_seqs": 4, "max_num_batched_tokens": 64, "async_scheduling": False, **engine},
        "cache": {"num_blocks": num_blocks, "block_size": BLOCK_TOKENS, "prefix_caching": False},
    }


def load(seed, rate, num_requests=40):
    return Workload(name="test", requests=tuple(mixed(num_requests, seed, rate)), block_tokens=BLOCK_TOKENS)


@settings(max_examples=6)
@given(
    seed=st.integers(0, 10**6),
    num_blocks=st.sampled_from([36, 40, 60, 128]),
    rate=st.sampled_from([5, 30, 100, 300]),
    num_seqs=st.integers(1, 6),
)
def test_requests_come_out_as_of_the_engine(seed, num_blocks, rate, num_seqs):
    config, registry = config_of(**covered(num_blocks, max_num_seqs=num_seqs))
    check_macro(config, registry, load(seed, rate), step_times=STEP_TIMES, num_replicas=1)


def check_equal(whole, macro):
    """A fleet of macro replicas has served as one of engines."""
    for name in (
        "num_steps",
        "num_scheduled_tokens",
        "num_recomputed_tokens",
        "num_prompt_tokens_admitted",
        "num_moved",
    ):
        assert getattr(whole, name) == getattr(macro, name), name
    assert whole.num_preemptions == macro.num_preemptions
    assert macro.busy_s == pytest.approx(whole.busy_s, abs=1e-9)
    for one, other in zip(whole.records, macro.records, strict=True):
        for name in ("replica", "num_output_tokens", "num_preemptions", "error"):
            assert getattr(one, name) == getattr(other, name), (name, one, other)
        for name in ("sent_s", "first_token_s", "finished_s"):
            assert getattr(other, name) == pytest.approx(getattr(one, name), abs=1e-9, nan_ok=True), (name, one, other)


def both(config, registry, workload, **options):
    """Run a fleet of engines and one of macro replicas."""
    return [serve(config, registry, workload, step_times=STEP_TIMES, **options) for serve in (simulate, simulate_macro)]


def test_a_fleet_of_them_is_a_fleet_of_engines():
    config, registry = config_of(**covered(40), router={"name": "least_loaded"})
    whole, macro = both(config, registry, load(3, 200), replicas=3)
    check_equal(whole, macro)
    assert macro.num_preemptions > 0


@st.composite
def histories(draw):
    """Events of three replicas: each fails or drains and joins again, in turns; one may join for the first time."""
    events = []
    for replica in range(3):
        serves = draw(st.integers(0, 3)) > 0
        for time_s in sorted(draw(st.lists(st.floats(0.01, 3.0), max_size=4, unique=True))):
            kind = draw(st.sampled_from(["fail", "drain"])) if serves else "join"
            serves = kind == "join"
            events.append(ReplicaEvent(time_s=time_s, replica=replica, kind=kind))
    return events


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    events=histories(),
    num_blocks=st.sampled_from([36, 60, 128]),
    rate=st.sampled_from([30, 100, 300]),
)
@example(seed=1, events=[], num_blocks=36, rate=300)  # a tie between replicas: loads are equal to the bit
def test_what_happens_to_them_happens_as_to_engines(seed, events, num_blocks, rate):
    config, registry = config_of(**covered(num_blocks), router={"name": "least_loaded"})
    check_equal(*both(config, registry, load(seed, rate), replicas=3, events=events))


def test_a_failure_among_preempted_and_moved_requests_moves_the_same_tokens():
    events = [ReplicaEvent(time_s=0.4 + 0.31 * i, replica=i % 3, kind="fail") for i in range(3)]
    events += [ReplicaEvent(time_s=0.5 + 0.31 * i, replica=i % 3, kind="join") for i in range(3)]
    config, registry = config_of(**covered(36), router={"name": "round_robin"})
    whole, macro = both(config, registry, load(5, 300), replicas=3, events=events)
    check_equal(whole, macro)
    assert macro.num_moved > 10
    assert macro.num_preemptions > 3
    assert all(one.num_output_tokens for one in macro.records)


def test_what_is_not_covered_is_refused_by_name():
    tables = covered() | {"scheduling": {"name": "priority"}, "cache": {"num_blocks": 128, "prefix_caching": True}}
    config, registry = config_of(**tables)
    with pytest.raises(CapabilityError, match=r"scheduling\.name = \"fcfs\".*cache\.prefix_caching = false"):
        simulate_macro(config, registry, load(0, 30), step_times=STEP_TIMES)


def test_a_difference_from_the_engine_is_refused_with_the_request_that_shows_it(monkeypatch):
    monkeypatch.setattr(MacroEngine, "_grow", lambda self, decodes: 0)
    config, registry = config_of(**covered(40))
    with pytest.raises(CapabilityError, match="differs from the engine at request 'r"):
        simulate_macro(config, registry, load(3, 200), step_times=STEP_TIMES)
