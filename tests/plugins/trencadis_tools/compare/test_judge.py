from __future__ import annotations

import math

import attrs
import numpy as np
import pytest

from support.simulation import mixed
from support.simulation import run as simulated
from trencadis.errors import ConfigError
from trencadis_tools.compare.judge import Effect, Judgement, difference_of, judge
from trencadis_tools.compare.metrics import metric_of
from trencadis_tools.compare.sensitivity import Flip
from trencadis_tools.simulation.qoe import qoe_of, qoe_v1_of
from trencadis_tools.simulation.summary import summary_of

TTFT = [metric_of("ttft_mean")]


def verdicts(judgement: Judgement) -> list[tuple[str, str]]:
    return [(effect.verdict, effect.winner) for effect in judgement.effects]


def test_metrics_are_what_they_are_called(make_workload, make_run) -> None:
    run = make_run(make_workload(num=40), service_s=0.01, tokens_s=2.0)
    for name, expected in {
        "e2e_mean": np.mean([record.e2e_s for record in run.records]),
        "ttft_p90": np.quantile([record.ttft_s for record in run.records], 0.9),
        "ttft_p99.5": np.quantile([record.ttft_s for record in run.records], 0.995),
        "tpot_p50": 1.1,  # half of them 2 s for one token, the others for ten
        "prefix_hit_ratio": 0.5,
        "slo_attainment": np.mean([record.ttft_s <= 1.0 and record.tpot_s <= 0.5 for record in run.records]),
        "max_itl_p90": 2.0,
        "qoe_above_0.9": np.mean([qoe_of(record) >= 0.9 for record in run.records]),
        "qoe_mean": np.mean([qoe_of(record) for record in run.records]),
        "qoe_v1_p10": np.quantile([qoe_v1_of(record) for record in run.records], 0.1),
    }.items():
        metric = metric_of(name)
        assert metric.summary(metric.values(run)) == pytest.approx(expected), name
    assert metric_of("output_throughput").of_run(run) == pytest.approx(20 * (2 + 11) / run.duration_s)
    assert metric_of("preemptions").of_run(run) == 3
    gaps_s = [0.2] * 10 * 20 + [2.0] * 20  # of all answers, whatever their lengths
    assert metric_of("itl_mean").of_run(run) == pytest.approx(np.mean(gaps_s))
    assert metric_of("itl_p95").of_run(run) == pytest.approx(np.quantile(gaps_s, 0.95))
    assert metric_of("itl_p50").of_run(run, [1, 3]) == pytest.approx(2.0)


def test_the_prefix_hit_ratio_is_that_of_tokens_as_in_a_summary_of_the_run() -> None:
    run = simulated(mixed(), replicas=2)
    metric = metric_of("prefix_hit_ratio")
    share = sum(one.num_cached_tokens for one in run.records) / sum(
        one.request.num_prompt_tokens for one in run.records
    )
    assert 0.1 < share < 0.9
    assert metric.summary(metric.values(run)) == pytest.approx(share, rel=1e-12)
    assert summary_of(run).prefix_hit_ratio == pytest.approx(share, rel=1e-12)
    first = np.arange(20)
    kept = [run.records[index] for index in first]
    share = sum(one.num_cached_tokens for one in kept) / sum(one.request.num_prompt_tokens for one in kept)
    assert metric.summary(metric.values(run, first)) == pytest.approx(share, rel=1e-12)


def test_a_ratio_spreads_as_resampled_ratios_of_sums_do(make_workload, make_run) -> None:
    """Prompts differ a hundredfold, and what is cached grows with them: the ratio of sums hardly varies, each request's part neither."""
    rng = np.random.default_rng(0)
    prompts = np.maximum(1, rng.lognormal(5, 1.5, 400)).astype(int)
    cached = (prompts * rng.uniform(0.4, 0.6, 400)).astype(int)
    run = make_run(make_workload(num=400))
    records = [
        attrs.evolve(
            one, request=attrs.evolve(one.request, num_prompt_tokens=int(prompt)), num_cached_tokens=int(found)
        )
        for one, prompt, found in zip(run.records, prompts, cached, strict=True)
    ]
    values = metric_of("prefix_hit_ratio").values(attrs.evolve(run, records=tuple(records)))
    picks = rng.integers(400, size=(4000, 400))
    resampled = cached[picks].sum(axis=1) / prompts[picks].sum(axis=1)
    assert values.std() / np.sqrt(400) == pytest.approx(resampled.std(), rel=0.1)


@pytest.mark.parametrize(
    ("name", "needs"), [("itl_p99", True), ("qoe_mean", True), ("max_itl_p50", True), ("tpot_p99", False)]
)
def test_times_of_tokens_are_kept_for_those_metrics_alone_that_need_them(name: str, needs: bool) -> None:
    assert metric_of(name).needs_token_times == needs


@pytest.mark.parametrize(
    "name", ["ttft", "ttft_p0", "ttft_p100", "goodput", "ttft_median", "ttft_above_0.9", "qoe_above_2"]
)
def test_an_unknown_metric_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match="no such metric"):
        metric_of(name)


def test_across_seeds_the_run_is_the_unit(make_workload, make_run) -> None:
    workloads = [make_workload(seed=seed) for seed in range(6)]
    runs = [[make_run(one, offset_s=offset_s) for one in workloads] for offset_s in (0.0, 0.1, 0.001)]
    judgement = judge(["slow", "slower", "same"], runs, TTFT, is_drawn=True)
    slower, same = judgement.effects
    assert slower.interval.num_units == 6
    assert slower.interval.difference == pytest.approx(0.1)
    assert verdicts(judgement) == [("better", "slow"), ("equal", "")]
    assert same.other_value == pytest.approx(same.baseline_value + 0.001)
    assert slower.relative(0.1) == pytest.approx(0.1 / slower.baseline_value)


def test_within_one_run_blocks_of_requests_are_the_unit(make_workload, make_run) -> None:
    workload = make_workload(num=2500)
    runs = [[make_run(workload, service_s=service_s)] for service_s in (0.5, 0.4)]
    metrics = [metric_of(name) for name in ("ttft_mean", "ttft_p90", "output_throughput")]
    judgement = judge(["half", "less"], runs, metrics, is_drawn=False)
    mean, p90, throughput = judgement.effects
    assert (mean.verdict, mean.winner) == (p90.verdict, p90.winner) == ("better", "less")
    assert mean.interval.method.startswith("blocks of ")
    assert len(mean.differences) == len(mean.sequence) > 10
    assert np.mean(mean.differences) == pytest.approx(mean.interval.difference, rel=0.1)
    assert (throughput.verdict, throughput.interval.low) == ("open", -math.inf)


def test_the_same_requests_are_cut_for_both(make_workload, make_run) -> None:
    workload = make_workload(num=200)
    runs = [[make_run(workload, offset_s=5.0)], [make_run(workload)]]
    judgement = judge(["late", "early"], runs, TTFT, is_drawn=True)
    assert judgement.effects[0].interval.difference == pytest.approx(-5.0)
    assert judgement.num_warm_up[0] > 0  # requests of the first one stay five seconds longer


def test_no_latency_is_compared_where_a_backlog_grows(make_workload, make_run) -> None:
    workloads = [make_workload(num=300, seed=seed) for seed in range(3)]
    runs = [[make_run(one, service_s=service_s) for one in workloads] for service_s in (0.3, 1.5)]
    metrics = [metric_of(name) for name in ("ttft_mean", "slo_attainment", "output_throughput")]
    judgement = judge(["steady", "drowning"], runs, metrics, is_drawn=True)
    assert [outcome.backlog.is_growing for outcome in judgement.outcomes] == [False, True]
    assert verdicts(judgement) == [("unstable", ""), ("unstable", ""), ("better", "steady")]
    assert judgement.is_decided
    steady, drowning = (outcome.values for outcome in judgement.outcomes)
    assert math.isnan(drowning["ttft_mean"])
    assert steady["ttft_mean"] == judgement.effects[0].baseline_value
    assert judgement.effects[0].differences == ()
    assert math.isnan(judgement.effects[0].interval.difference)


def test_requests_that_one_of_them_refused_count_for_none_and_many_leave_the_verdict_open(
    make_workload, make_run
) -> None:
    workload = make_workload(num=100)
    for failed, verdict in ((range(50, 51), "equal"), (range(50, 60), "open")):
        runs = [[make_run(workload, service_s=0.001)] * 2, [make_run(workload, service_s=0.001, failed=failed)] * 2]
        judgement = judge(["all", "fewer"], runs, TTFT, is_drawn=True)
        assert judgement.outcomes[1].num_failed == 2 * len(failed)
        assert judgement.effects[0].verdict == verdict
        assert judgement.effects[0].interval.difference == pytest.approx(0.0, abs=1e-9)
    assert judgement.effects[0].reasons == ("20 of 200 requests failed under fewer",)


def test_nothing_answered_has_no_value(make_workload, make_run) -> None:
    workload = make_workload(num=20)
    runs = [[make_run(workload)] * 2, [make_run(workload, failed=range(20))] * 2]
    (effect,) = judge(["some", "none"], runs, TTFT, is_drawn=True).effects
    assert effect.verdict == "open"
    assert math.isnan(effect.interval.difference)


def test_holm_asks_more_of_many_comparisons(make_workload, make_run) -> None:
    # Differences of .05 ± .047 s in four runs: p is about .02 alone, and .1 among five.
    workloads = [make_workload(seed=seed) for seed in range(4)]
    offsets_s = (0.03, 0.08, 0.035, 0.085)
    baseline = [make_run(one) for one in workloads]
    other = [make_run(one, offset_s=offset_s) for one, offset_s in zip(workloads, offsets_s, strict=True)]
    alone = judge(["baseline", "other"], [baseline, other], TTFT, is_drawn=True).effects[0]
    assert 0.01 < alone.interval.p_value < 0.05
    assert (alone.verdict, alone.winner) == ("better", "baseline")
    names = ["baseline", "other", "c", "d", "e", "f"]
    among = judge(names, [baseline, other, *[baseline] * 4], TTFT, is_drawn=True).effects[0]
    assert among.adjusted_p == pytest.approx(5 * alone.interval.p_value)
    assert among.verdict == "open"


def test_a_sure_difference_of_less_than_two_per_cent_is_no_better(make_workload, make_run) -> None:
    workloads = [make_workload(seed=seed) for seed in range(8)]
    baseline = [make_run(one) for one in workloads]
    value = judge(["a", "b"], [baseline, baseline], TTFT, is_drawn=True).outcomes[0].values["ttft_mean"]
    for share, verdict in ((0.019, "equal"), (0.021, "better")):
        other = [make_run(one, offset_s=share * value) for one in workloads]
        assert judge(["a", "b"], [baseline, other], TTFT, is_drawn=True).effects[0].verdict == verdict


def test_a_flip_opens_the_verdict_and_says_by_what() -> None:
    from trencadis_tools.compare.statistics import Interval

    interval = Interval(difference=-1.0, low=-2.0, high=-0.5, p_value=0.01, num_units=9, method="runs")
    effect = Effect(
        metric="ttft_mean",
        other="b",
        baseline_value=4.0,
        other_value=3.0,
        interval=interval,
        verdict="better",
        winner="b",
    )
    judgement = Judgement(outcomes=(), effects=[effect, effect], num_warm_up=(0,))
    flipped = judgement.with_flips([Flip(metric="ttft_mean", other="b", scaled="base_s × 0.8", difference=0.1)])
    assert verdicts(flipped)[0] == ("open", "")
    assert flipped.effects[0].reasons == ("the sign changes with step times of base_s × 0.8",)
    assert not flipped.is_decided
    assert judgement.with_flips([]) == judgement


def test_the_difference_of_a_second_look_is_that_of_the_first(make_workload, make_run) -> None:
    workloads = [make_workload(seed=seed) for seed in range(3)]
    baseline, other = ([make_run(one, service_s=service_s) for one in workloads] for service_s in (0.5, 0.6))
    (effect,) = judge(["a", "b"], [baseline, other], TTFT, is_drawn=True).effects
    assert difference_of(TTFT[0], baseline, other) == pytest.approx(effect.interval.difference)
