from __future__ import annotations

import pytest

from trencadis.clock import SimulatedClock
from trencadis_testing.engines import make_engine
from trencadis_testing.workloads import arrivals, serve, wrong_texts


def engine_of(clock, **options):
    return make_engine(clock=clock, num_blocks=60, max_num_seqs=4, max_num_batched_tokens=24, warmup=False, **options)


def test_a_workload_shares_prefixes_comes_in_order_and_has_names_of_its_own():
    todo = arrivals(0)
    assert [a.step for a in todo] == sorted(a.step for a in todo)
    assert len({a.request.request_id for a in todo}) == len(todo) == 24
    starts = [a.request.prompt_token_ids[:12] for a in todo]
    assert max(starts.count(start) for start in starts) > 5


def test_work_that_does_not_end_is_an_error():
    clock = SimulatedClock()
    with pytest.raises(AssertionError, match="after 3 steps"):
        serve(engine_of(clock), clock, arrivals(0), max_steps=3)


def test_a_wrong_text_a_lost_request_and_a_failed_one_are_named():
    import attrs

    from trencadis.records import FinishReason

    clock, todo = SimulatedClock(), arrivals(1, num_requests=4)
    served = serve(engine_of(clock), clock, todo)
    ends = dict(served.ends)
    one, two, three, _ = ends
    ends[one] = attrs.evolve(ends[one], token_ids=ends[one].token_ids + 1)
    ends[two] = attrs.evolve(ends[two], finish_reason=FinishReason.ERROR, error="it broke")
    del ends[three]
    faults = wrong_texts(attrs.evolve(served, ends=ends), todo)
    assert any(fault.startswith(f"{one} is [") for fault in faults)
    assert f"{three} is lost" in faults
    assert f"{two} failed: it broke" in faults
    assert len(faults) == 3
