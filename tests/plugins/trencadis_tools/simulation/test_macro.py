from __future__ import annotations

import pytest
from hypothesis import given, settings
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


def test_a_fleet_of_them_is_a_fleet_of_engines():
    config, registry = config_of(**covered(40), router={"name": "least_loaded"})
    whole = simulate(config, registry, load(3, 200), step_times=STEP_TIMES, replicas=3)
    macro = simulate_macro(config, registry, load(3, 200), step_times=STEP_TIMES, replicas=3)
    assert whole.num_preemptions == macro.num_preemptions > 0
    for name in ("num_steps", "num_scheduled_tokens", "num_recomputed_tokens", "num_prompt_tokens_admitted"):
        assert getattr(whole, name) == getattr(macro, name), name
    for one, other in zip(whole.records, macro.records, strict=True):
        assert (one.replica, one.num_output_tokens) == (other.replica, other.num_output_tokens)
        assert one.finished_s == pytest.approx(other.finished_s, abs=1e-9)


def test_what_is_not_covered_is_refused_by_name():
    tables = covered() | {"scheduling": {"name": "priority"}, "cache": {"num_blocks": 128, "prefix_caching": True}}
    config, registry = config_of(**tables)
    with pytest.raises(CapabilityError, match=r"scheduling\.name = \"fcfs\".*cache\.prefix_caching = false"):
        simulate_macro(config, registry, load(0, 30), step_times=STEP_TIMES)
    config, registry = config_of(**covered())
    events = [ReplicaEvent(time_s=1.0, replica=0, kind="fail")]
    with pytest.raises(CapabilityError, match="do not fail"):
        simulate_macro(config, registry, load(0, 30), step_times=STEP_TIMES, events=events)


def test_a_difference_from_the_engine_is_refused_with_the_request_that_shows_it(monkeypatch):
    monkeypatch.setattr(MacroEngine, "_grow", lambda self, decodes: 0)
    config, registry = config_of(**covered(40))
    with pytest.raises(CapabilityError, match="differs from the engine at request 'r"):
        simulate_macro(config, registry, load(3, 200), step_times=STEP_TIMES)
