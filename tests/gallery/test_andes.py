"""The results of docs/gallery/andes.md, and its policies: streams with unread tokens are preempted for requests that wait."""

from __future__ import annotations

import numpy as np
import pytest
from examples.gallery.andes.measure import HERE, POLICIES, RATES, Row, capacity, compare_at, serve
from examples.gallery.andes.policies import Andes, RoundRobin, gain
from hypothesis import given
from hypothesis import strategies as st

from support.strategies.gallery_pages import page_of, results_of
from trencadis.records import Request, SamplingParams
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.scheduling import SchedulingConformance
from trencadis_tools.compare.statistics import run_interval
from trencadis_tools.simulation.qoe import qoe_of
from trencadis_tools.workloads import Workload
from trencadis_tools.workloads.workload_file import read_recipe

SMALL = {"num_blocks": 24}


class TestAndes(SchedulingConformance):
    counts_tokens = True
    num_histories = 3

    def make(self):
        """With the cap of the paper, 1, short ones that come in every step preempt a long one before its first token, again and again."""
        return Andes(max_preemptions=0.1)


class TestRoundRobin(SchedulingConformance):
    counts_tokens = True
    num_histories = 1
    make = RoundRobin


@given(
    now_s=st.floats(0, 20),
    wait_s=st.floats(0, 5),
    stock_s=st.floats(-3, 20),
    ttft_s=st.floats(0.1, 5),
    tpot_s=st.floats(0.05, 1),
    token_s=st.floats(0.02, 2),
    horizon_s=st.floats(1, 50),
)
def test_a_gain_is_what_a_reader_reads_of_tokens_that_come(
    now_s, wait_s, stock_s, ttft_s, tpot_s, token_s, horizon_s
) -> None:
    start_s, free_s, end_s = now_s + wait_s, max(ttft_s, now_s + stock_s), now_s + horizon_s
    edges = np.linspace(0, end_s, 4001)
    moments, width_s = (edges[1:] + edges[:-1]) / 2, edges[1]
    read, area = 0.0, 0.0
    for moment in moments:  # token by token as they come, but without gaps
        came = max(moment - start_s, 0) / token_s
        read = min(read + width_s / tpot_s, came) if moment > free_s else 0.0
        area += read * width_s
    expected = (np.maximum(moments - ttft_s, 0) / tpot_s).sum() * width_s
    arrays = {"start_s": start_s, "free_s": free_s, "ttft_s": ttft_s, "tpot_s": tpot_s}
    found = gain(
        np.array([now_s]),
        **{name: np.array([value]) for name, value in arrays.items()},
        token_s=token_s,
        horizon_s=horizon_s,
    )
    if end_s <= ttft_s:
        assert found == 0.0
    elif expected > 1:
        assert found == pytest.approx(area / expected, rel=0.02, abs=0.02)


def short(seed: int) -> Workload:
    """Short chats that come faster than a small cache takes them."""
    lengths = {
        "prompt": {"kind": "uniform", "min": 10, "max": 60},
        "output": {"kind": "uniform", "min": 20, "max": 120},
    }
    changes = {"seed": seed, "limit": 24, "arrivals": {"rate": 60.0}, "lengths": lengths}
    return read_recipe(str(HERE / "chats.toml"), changes=changes).make()


def test_quality_is_better_and_pauses_do_not_show_where_tokens_come_faster_than_they_are_read() -> None:
    found = {
        policy: [serve(policy, short(seed), cache=SMALL) for seed in range(3)]
        for policy in ("fcfs", "round_robin", "andes")
    }
    qoe = {
        policy: np.array([np.mean([qoe_of(one) for one in run.records]) for run in runs])
        for policy, runs in found.items()
    }
    for other in ("fcfs", "round_robin"):
        assert run_interval(qoe["andes"] - qoe[other]).low > 0, other
    assert all(run.num_preemptions for run in found["andes"])


@pytest.mark.parametrize(("cap", "least", "most"), [(0.5, 1, 4), (0.0, 33, 160)])
def test_the_cap_bounds_preemptions(cap: float, least: int, most: int) -> None:
    policy = Andes(max_preemptions=cap, running_bonus=0.0, refine=False)
    engine = make_engine(policy=policy, num_blocks=200, max_num_seqs=2, max_num_batched_tokens=24)
    for number in range(8):
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        engine.add(Request(request_id=str(number), prompt_token_ids=(number,) * 9, params=params))
    drain(engine)
    assert least <= engine.totals.num_preempted <= most


def test_a_capacity_lies_on_a_line_between_rates() -> None:
    def row(rate: float, qoe: float) -> Row:
        rest = dict.fromkeys(
            ("qoe_v1", "above", "ttft_p90_s", "preemptions", "tokens_per_s", "ratio", "low", "high"), 0.0
        )
        return Row(load="chats", policy="fcfs", rate=rate, qoe=qoe, **rest)

    assert capacity([row(2, 0.8), row(1, 1.0)]) == pytest.approx(1.5)
    assert capacity([row(1, 0.8), row(2, 1.0)]) == 0
    assert capacity([row(1, 1.0), row(2, 0.9)]) == 2


def test_the_page_shows_the_results_that_are_kept() -> None:
    page = page_of("andes")
    kept = results_of("andes")
    rows = [Row(**row) for row in kept]
    for load, rates in RATES.items():
        for rate in rates:
            own = {row.policy: row for row in rows if (row.load, row.rate) == (load, rate)}
            best = own["andes"]
            assert (
                f"| `{load}` | {rate:g} | {' | '.join(f'{own[policy].qoe:.2f}' for policy in POLICIES)} "
                f"| {best.ratio:.2f} ({best.low:.2f} to {best.high:.2f}) |" in page
            )
        capacities = [
            capacity([row for row in rows if (row.load, row.policy) == (load, policy)]) for policy in POLICIES
        ]
        assert f"| `{load}` | {' | '.join(f'{one:.1f}' for one in capacities)} |" in page


@pytest.mark.nightly
def test_kept_results_are_what_the_script_measures() -> None:
    kept = results_of("andes")
    expected = {row["policy"]: row["qoe"] for row in kept if (row["load"], row["rate"]) == ("chats", 10.0)}
    assert {row.policy: row.qoe for row in compare_at("chats", 10.0, 3)} == pytest.approx(expected)
