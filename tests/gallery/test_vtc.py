"""The results of docs/gallery/vtc.md: fair sharing keeps the bound of its theorem, which the other policies do not."""

from __future__ import annotations

import attrs
import pytest
from examples.gallery.vtc.measure import HERE, bound_of, clients, measure, returning
from examples.gallery.vtc.policies import LeastCounterFirst, RequestsPerMinute

from support.strategies.gallery_pages import page_of, results_of
from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext
from trencadis.records import Request
from trencadis_testing.scheduling import SchedulingConformance
from trencadis_tools.workloads import Workload
from trencadis_tools.workloads.workload_file import read_recipe

SMALL = {"num_blocks": 16}
"""A KV cache that is full soon, and has a small bound."""


def short(num_requests: int) -> Workload:
    """Two clients; short texts, nearly at once."""
    length = {"kind": "uniform", "min": 5, "max": 35}
    changes = {"limit": num_requests, "tenants": {"num": 2}, "lengths": {"prompt": length, "output": length}}
    return read_recipe(str(HERE / "clients.toml"), changes={**changes, "arrivals": {"rate": 20.0}}).make()


class TestLeastCounterFirst(SchedulingConformance):
    # It declares no fairness: the theorem's bound does not hold for it, by little with unequal weights.
    num_histories = 4
    make = LeastCounterFirst


class TestRequestsPerMinute(SchedulingConformance):
    may_refuse = True
    num_histories = 4

    def make(self) -> RequestsPerMinute:
        return RequestsPerMinute(8, context=ComponentContext(clock=SimulatedClock(), seed=0))


def test_a_tenant_is_refused_beyond_its_requests_of_a_minute_and_only_then() -> None:
    clock = SimulatedClock()
    policy = RequestsPerMinute(2, context=ComponentContext(clock=clock, seed=0))

    def is_refused(tenant: str) -> bool:
        request = Request(request_id="one", prompt_token_ids=(1,), tenant=tenant)
        return bool(policy.admit_tenant(request, num_waiting=0, num_waiting_tokens=0))

    assert [is_refused(tenant) for tenant in "aabaab"] == [False, False, False, True, True, False]
    clock.advance(59.0)
    assert is_refused("a")
    clock.advance(1.0)
    assert not is_refused("a")


def test_fair_sharing_keeps_the_bound_of_the_theorem_and_first_come_first_served_does_not() -> None:
    workload = short(160)
    fair, fcfs = (measure(workload, policy, **SMALL) for policy in ("vtc", "fcfs"))
    assert fair.bound == fcfs.bound == bound_of(workload, 16 * 16) == 4 * 16 * 16
    assert fair.gap <= fair.bound < fcfs.gap


def test_a_client_that_returns_has_credit_under_least_counter_first_and_none_under_fair_sharing() -> None:
    workload = returning(short(160))
    half_s = workload.requests[-1].arrival_s / 2
    assert {one.tenant for one in workload.requests if one.arrival_s < half_s} == {"0"}
    lcf, fair = (measure(workload, policy, **SMALL) for policy in ("lcf", "vtc"))
    assert fair.gap < fair.bound
    assert fair.gap < lcf.gap


def test_the_page_shows_the_results_that_are_kept() -> None:
    page = page_of("vtc")
    for row in results_of("vtc"):
        numbers = f"{row['gap']:,.0f} | {row['light_ttft_p90_s']:.3g} | {row['heavy_ttft_p90_s']:.3g}"
        assert f"| `{row['policy']}` | {numbers} | {row['tokens_per_s']:.0f} | {row['num_refused']} |" in page
        if row["policy"] == "vtc":
            assert row["gap"] <= row["bound"]


@pytest.mark.nightly
@pytest.mark.parametrize("num", [2, 9, 27])
def test_kept_results_are_what_the_script_measures(num: int) -> None:
    kept = results_of("vtc")
    (row,) = [row for row in kept if row["policy"] == "vtc" and row["workload"] == f"{num} clients"]
    assert attrs.asdict(measure(clients(num), "vtc")) == pytest.approx(row)
