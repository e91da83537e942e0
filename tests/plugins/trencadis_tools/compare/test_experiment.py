from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

import attrs
import pytest

from trencadis.errors import ConfigError
from trencadis_tools.compare import plots
from trencadis_tools.compare.candidates import Candidate
from trencadis_tools.compare.experiment import Experiment, at_rate, left_open, rate_of, run_experiment
from trencadis_tools.compare.metrics import metric_of
from trencadis_tools.compare.sensitivity import scaled_step_times
from trencadis_tools.compare.wording import outcome_notes
from trencadis_tools.simulation import Run, StepShape
from trencadis_tools.simulation.step_times import BucketStepTimes, LinearStepTimes
from trencadis_tools.workloads import Workload


def candidates(*names: str) -> list[Candidate]:
    return [Candidate(name=name, config=None, registry=None, given={"name": name}, plan_hash=name) for name in names]


@attrs.define
class Queues:
    """Runs workloads on the queue of each name, and notes on what."""

    serve: Callable[..., Run]
    services_s: dict[str, float]
    seen: list[tuple[int, Workload]] = attrs.field(factory=list)

    def __call__(self, candidates: Sequence[Candidate], workload: Workload, pair: int) -> list[Run]:
        self.seen.append((pair, workload))
        return [self.serve(workload, service_s=self.services_s[one.name]) for one in candidates]


@pytest.fixture
def queues(make_run) -> Callable[..., Queues]:
    return lambda **services_s: Queues(make_run, services_s)


def experiment(workload_of: Callable[[int], Workload], **more) -> Experiment:
    terms = {"metrics": [metric_of("ttft_mean")], "is_drawn": True, "num_pairs": 4, **more}
    return Experiment(candidates=candidates("a", "b"), workload_of=workload_of, **terms)


def test_every_configuration_gets_the_same_workload_object_of_each_seed(make_workload, queues) -> None:
    run_all = queues(a=0.5, b=0.4)
    (result,) = run_experiment(experiment(lambda seed: make_workload(seed=seed)), run_all)
    assert [(pair, workload.seed) for pair, workload in run_all.seen] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    for workload, one, two in zip(result.workloads, *result.runs, strict=True):
        assert all(x.request is y.request for x, y in zip(one.records, two.records, strict=True))
        assert all(record.request in workload.requests for record in one.records)


def test_it_stops_when_it_is_decided_and_not_before_twenty_pairs(make_workload, queues) -> None:
    run_all = queues(a=0.5, b=0.25)
    terms = {"until_decided": True, "num_pairs": 100}
    (result,) = run_experiment(experiment(lambda seed: make_workload(num=60, seed=seed), **terms), run_all)
    assert 20 <= len(result.workloads) < 60
    (effect,) = result.judgement.effects
    assert (effect.verdict, effect.winner, effect.interval.method) == ("better", "b", "sequence of runs")
    assert effect.interval.num_units == len(result.workloads)


def test_progress_has_the_most_that_it_will_take_and_ends_at_what_it_took(make_workload, queues) -> None:
    run_all, told = queues(a=0.5, b=0.25), []
    terms = {"until_decided": True, "num_pairs": 100, "rates": (0.5, 0.6)}

    def note(done: int, total: int | None = None) -> None:
        told.append((done, total))

    compared = experiment(lambda seed: make_workload(num=60, seed=seed), **terms)
    run_experiment(compared, run_all, step_times=None, note=note)
    assert told[0] == (0, 2 * 2 * 100)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == told[-1][1] == 2 * len(run_all.seen)
    after_first = next(total for _, total in told if total != 400)
    assert 2 * 100 < after_first < 400

    told.clear()
    num_models = len(scaled_step_times(LinearStepTimes()))
    tried = experiment(lambda seed: make_workload(num=60, seed=seed))
    run_experiment(tried, run_all, step_times=LinearStepTimes(), with_step_times=lambda _: run_all, note=note)
    assert told[0] == (0, 2 * 4 * (1 + num_models))
    assert told[-1] == (2 * 4 * (1 + num_models),) * 2


def test_of_a_trace_tails_are_looked_at_as_it_grows(make_workload, queues) -> None:
    run_all = queues(a=0.5, b=0.25)
    terms = {"until_decided": True, "is_drawn": False, "metrics": [metric_of("ttft_p90"), metric_of("ttft_mean")]}
    (result,) = run_experiment(experiment(lambda seed: make_workload(num=9000, seed=seed), **terms), run_all)
    lengths = [len(workload.requests) for _, workload in run_all.seen]
    assert lengths == [2000, 4000, 8000, 9000][: len(lengths)]
    assert len(lengths) < 4
    assert [effect.verdict for effect in result.judgement.effects] == ["better", "better"]
    assert result.judgement.effects[0].interval.method.endswith(", 4 looks")


def test_what_is_never_decided_ends_with_the_most_pairs(make_workload, make_run) -> None:
    def run_all(candidates: Sequence[Candidate], workload: Workload, pair: int) -> list[Run]:
        return [make_run(workload), make_run(workload, offset_s=1.0 if pair % 2 else -1.0)]

    terms = {"until_decided": True, "num_pairs": 24}
    (result,) = run_experiment(experiment(lambda seed: make_workload(num=30, seed=seed), **terms), run_all)
    assert len(result.workloads) == 24
    assert result.judgement.effects[0].verdict == "open"


def test_an_open_trace_is_run_to_its_end(make_workload, make_run) -> None:
    lengths = []

    def run_all(candidates: Sequence[Candidate], workload: Workload, pair: int) -> list[Run]:
        lengths.append(len(workload.requests))
        late = {index: 0.3 * (-1) ** (index // 700) for index in range(len(workload.requests))}
        plain = make_run(workload)
        moved = [
            attrs.evolve(record, first_token_s=record.first_token_s + late[index])
            for index, record in enumerate(plain.records)
        ]
        return [plain, attrs.evolve(plain, records=tuple(moved))]

    terms = {"until_decided": True, "is_drawn": False}
    run_experiment(experiment(lambda seed: make_workload(num=5000), **terms), run_all)
    assert lengths == [2000, 4000, 5000]


def test_how_long_answers_may_be_does_not_depend_on_the_part_that_is_run(make_workload, queues) -> None:
    workload = make_workload(num=100)
    longest = attrs.evolve(workload.requests[-1], num_output_tokens=77)
    workload = attrs.evolve(workload, requests=(*workload.requests[:-1], longest))
    run_all = queues(a=0.5, b=0.4)
    run_experiment(experiment(lambda seed: workload, max_requests=50, num_pairs=1), run_all)
    ((_, seen),) = run_all.seen
    assert len(seen.requests) == 50
    assert {request.max_tokens for request in seen.requests} == {77}


def test_a_trace_that_is_too_short_for_intervals_is_refused(make_workload, queues) -> None:
    with pytest.raises(ConfigError, match=r"500 requests.*need 1000"):
        run_experiment(experiment(lambda seed: make_workload(num=500), is_drawn=False), queues(a=1, b=1))


def test_rates_stretch_arrivals_and_draw_nothing(make_workload, queues) -> None:
    run_all = queues(a=0.2, b=0.1)
    results = run_experiment(experiment(lambda seed: make_workload(seed=seed), rates=[1.0, 4.0], num_pairs=1), run_all)
    assert [str(result.point) for result in results] == ["rate 1", "rate 4"]
    slow, fast = (workload for _, workload in run_all.seen)
    assert (rate_of(slow), rate_of(fast)) == (pytest.approx(1.0), pytest.approx(4.0))
    ratios = {round(x.arrival_s / y.arrival_s, 9) for x, y in zip(slow.requests, fast.requests, strict=True)}
    assert ratios == {4.0}
    at_once = attrs.evolve(slow, requests=tuple(attrs.evolve(one, arrival_s=0.0) for one in slow.requests))
    with pytest.raises(ConfigError, match="all requests come at once"):
        at_rate(at_once, 2.0)


def test_a_claim_is_tried_with_each_coefficient_and_dropped_if_its_sign_changes(make_workload, make_run) -> None:
    tried = []

    def with_step_times(times: LinearStepTimes):
        def run_all(candidates: Sequence[Candidate], workload: Workload, pair: int) -> list[Run]:
            tried.append(times)
            slow_s = 0.6 if times.base_s >= times.token_s else 0.2  # with a smaller base the other one is better
            return [make_run(workload, service_s=0.5), make_run(workload, service_s=slow_s)]

        return run_all

    times = LinearStepTimes(base_s=0.01, token_s=0.009, context_s=0.0)
    (result,) = run_experiment(
        experiment(lambda seed: make_workload(seed=seed), num_pairs=6),
        with_step_times(times),
        step_times=times,
        with_step_times=with_step_times,
    )
    (effect,) = result.judgement.effects
    assert (effect.verdict, effect.winner) == ("open", "")
    assert effect.reasons == ("the sign changes with step times of base_s × 0.8, token_s × 1.25",)
    assert len(tried) == 6 * (1 + 4)
    assert result.judgement.tried == ("base_s × 0.8", "token_s × 0.8", "base_s × 1.25", "token_s × 1.25")
    assert outcome_notes(result)[-1].endswith(
        "with step times of base_s × 0.8, token_s × 0.8, base_s × 1.25, token_s × 1.25."
    )


def test_pictures_are_the_same_bytes_and_leave_out_who_is_unstable(make_workload, queues) -> None:
    run_all = queues(a=0.5, b=2.0)
    terms = {"metrics": [metric_of("ttft_mean"), metric_of("output_throughput")], "num_pairs": 20}
    (result,) = run_experiment(experiment(lambda seed: make_workload(seed=seed), **terms), run_all)
    assert [outcome.backlog.is_growing for outcome in result.judgement.outcomes] == [False, True]
    throughput = result.judgement.effects[1]
    for draw in (
        lambda: plots.cdf_plot(result),
        lambda: plots.sequence_plot(throughput, "a"),
        lambda: plots.line_plot([result, result], metric_of("ttft_mean"), xs=["x", "y"], label="setting"),
    ):
        picture = draw()
        assert picture == draw()
        assert picture.startswith("<svg ")
    assert ">b</text>" not in plots.cdf_plot(result)
    assert ">b: unstable</text>" in plots.line_plot([result], metric_of("ttft_mean"), xs=[1.0], label="rate")


def test_coefficients_are_numbers_of_the_model_that_change_a_step() -> None:
    names = [name for name, _ in scaled_step_times(LinearStepTimes(host_base_s=0.002, row_s=1e-12))]
    parts = ("host_base_s", "base_s", "token_s", "context_s")
    assert names == [f"{part} × {factor}" for factor, part in itertools.product(("0.8", "1.25"), parts)]
    for name, model in scaled_step_times(LinearStepTimes()):
        part, _, factor = name.partition(" × ")
        assert getattr(model, part) == pytest.approx(getattr(LinearStepTimes(), part) * float(factor))


def test_times_of_buckets_are_one_coefficient_and_unknown_models_are_scaled_as_wholes() -> None:
    from trencadis.records import Bucket, Phase

    bucket = Bucket(phase=Phase.DECODE, batch_size=8, query_len=1, num_blocks=16)
    times = BucketStepTimes(times_s={bucket: 0.01}, lines={Phase.DECODE: (0.01, 0.0, 0.0)})
    scaled = dict(scaled_step_times(times))
    assert list(scaled) == ["times_s × 0.8", "times_s × 1.25"]
    assert scaled["times_s × 1.25"].times_s == {bucket: 0.0125}

    class Constant:
        def device_s(self, shape: StepShape) -> float:
            return 1.0

        def host_s(self, shape: StepShape) -> float:
            return 0.5

    models = dict(scaled_step_times(Constant()))
    assert list(models) == ["device × 0.8", "host × 0.8", "device × 1.25", "host × 1.25"]
    assert (models["host × 0.8"].device_s(StepShape()), models["host × 0.8"].host_s(StepShape())) == (1.0, 0.4)


def test_what_will_stay_open_is_known_before_the_runs(make_workload) -> None:
    metrics = [metric_of("ttft_mean"), metric_of("output_throughput")]

    def found(num: int, **terms) -> list[str]:
        return left_open(experiment(lambda seed: make_workload(num=num, seed=seed), metrics=metrics, **terms))

    assert found(50) == found(50, num_pairs=2) == []
    assert found(50, num_pairs=1) == [
        "one run of each configuration has no interval: every verdict stays open. Take more --seeds."
    ]
    throughput, short = found(1200, is_drawn=False)
    assert throughput.startswith("output_throughput: one run has no interval")
    assert "if the warm-up is longer than 200 of its 1200 requests, the 1000 are not left" in short
    assert len(found(2000, is_drawn=False)) == len(found(3000, is_drawn=False, max_requests=2000)) == 1
    assert len(found(3000, is_drawn=False, max_requests=1500)) == 2


def test_axes_are_of_whole_pairs_of_milliseconds_below_a_second_and_of_few_plain_numbers(make_workload, queues) -> None:
    run_all = queues(a=0.5, b=0.4)
    (result,) = run_experiment(experiment(lambda seed: make_workload(seed=seed), num_pairs=3), run_all)
    (effect,) = result.judgement.effects

    def texts(picture: str) -> list[str]:
        return re.findall(r"<text[^>]*>([^<]*)</text>", picture)

    differences = texts(plots.differences_plot(effect, "a"))
    assert "ttft_mean: b − a, ms" in differences
    assert differences[: differences.index("pair")] == ["1", "2", "3"]
    shares = texts(plots.cdf_plot(result))
    ticks = [float(text) for text in shares[: shares.index("TTFT, s")]]
    assert 2 <= len(ticks) <= 7
    assert ticks == sorted(set(ticks))
