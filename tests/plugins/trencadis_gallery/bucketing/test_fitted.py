from __future__ import annotations

import csv
import itertools
import math
import random
from pathlib import Path

import attrs
import numpy as np
import pytest

from support.strategies.bucket_cases import SMALL
from trencadis.clock import SimulatedClock
from trencadis.errors import ConfigError
from trencadis.interfaces import ComponentContext
from trencadis.records import Bucket, Phase, Shape
from trencadis_gallery import trencadis_bucketings
from trencadis_gallery.bucketing.fitted import Budget, Fitted, choose, time_s
from trencadis_gallery.bucketing.fitted_problem import Problem
from trencadis_gallery.bucketing.fitted_sizes import optimal_sizes
from trencadis_gallery.bucketing.workloads import DeviceCost, Workload
from trencadis_gallery.bucketing.workloads.workload import read_source
from trencadis_gallery.config import FittedConfig
from trencadis_plugins.bucketing.exponential import Exponential
from trencadis_testing.bucketing import BucketingConformance
from trencadis_tools.buckets import measure

CONVERSATION = Path(__file__).parents[5] / "shared" / "data" / "traces" / "azure_llm_2023_conv.csv"


LIMITS = attrs.evolve(
    SMALL,
    max_model_len=8192,
    max_num_seqs=64,
    max_num_batched_tokens=8192,
    num_blocks=4000,
)
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:00:{second:02},{17 * second % 900 + 1},{7 * second % 31 + 1}\n" for second in range(60)
)


@pytest.fixture(scope="session")
def trace(tmp_path_factory):
    file = tmp_path_factory.mktemp("fitted") / "trace.csv"
    file.write_text(TRACE)
    return str(file)


@pytest.fixture
def conversation():
    if not CONVERSATION.exists():
        pytest.skip(f"{CONVERSATION} is not there: the shared data folder is not part of the repository")
    return CONVERSATION


class TestFitted(BucketingConformance):
    @pytest.fixture(autouse=True)
    def _trace(self, trace):
        self.trace = trace

    def make(self, limits):
        return Fitted(limits, FittedConfig(trace=self.trace, max_graphs=20))


def queries(file):
    with file.open() as rows:
        return [min(int(row["ContextTokens"]), 8192) for row in csv.DictReader(rows)]


def record(file, query_lens):
    rows = "".join(f"prefill,1,{query_len},0,1\n" for query_len in query_lens)
    file.write_text("phase,batch_size,query_len,num_blocks,count\n" + rows)
    return FittedConfig(trace=str(file), max_graphs=13)


def padding(strategy, query_lens):
    return sum(strategy.bucket_for(Shape(1, size, 0)).query_len for size in query_lens) / sum(query_lens) - 1


def test_half_of_the_conversation_predicts_the_other_better_than_growing_sizes(tmp_path, conversation):
    sizes = queries(conversation)
    first, second = sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]
    fitted = Fitted(LIMITS, record(tmp_path / "first.csv", first))
    exponential = Exponential(LIMITS)
    of_queries = {bucket.query_len for bucket in exponential.buckets(LIMITS) if bucket.phase is Phase.PREFILL}
    prefill = [bucket for bucket in fitted.buckets(LIMITS) if bucket.phase is Phase.PREFILL]
    assert (len(prefill), len(of_queries)) == (12, 12)
    assert padding(fitted, second) <= 0.14
    assert padding(exponential, second) == pytest.approx(0.215, abs=0.001)


@pytest.mark.slow
def test_a_quarter_of_the_graphs_pads_the_conversation_less_than_growing_sizes(conversation):
    limits = attrs.evolve(LIMITS, max_num_batched_tokens=2048, max_num_seqs=256)
    workload = read_source(conversation).workload(limits, DeviceCost())
    fitted = measure(
        Fitted(limits, FittedConfig(trace=str(conversation), max_graphs=32)), limits, DeviceCost(), workload
    )
    grown = measure(Exponential(limits), limits, DeviceCost(), workload)
    assert len(fitted.buckets) == 32 < len(grown.buckets) / 4
    assert fitted.prompt_padding < 0.75 * grown.prompt_padding
    assert fitted.decode_padding < 0.5 * grown.decode_padding
    assert fitted.time_padding < 0.75 * grown.time_padding
    assert fitted.num_unprepared == 0


def test_compile_time_is_a_number_of_buckets(trace):
    by_time = FittedConfig(trace=trace, max_graphs=0, max_compile_s=3.7, cost=DeviceCost(compile_s=0.4))
    by_number = FittedConfig(trace=trace, max_graphs=9)
    assert Fitted(LIMITS, by_time).buckets(LIMITS) == Fitted(LIMITS, by_number).buckets(LIMITS)
    tighter = attrs.evolve(by_time, max_graphs=5)
    assert len(Fitted(LIMITS, tighter).buckets(LIMITS)) == 5


def test_memory_budget_is_kept(trace):
    budget = DeviceCost().graph_bytes(Shape(1, 8192, 0)) * 1.2
    table = Fitted(LIMITS, FittedConfig(trace=trace, max_graphs=0, max_graph_bytes=budget)).buckets(LIMITS)
    assert sum(DeviceCost().graph_bytes(bucket) for bucket in table) <= budget
    assert len(table) > 10


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trace": "nope.csv"}, "no such trace file"),
        ({"trace": ""}, 'trace = "": there is nothing to learn from'),
        ({"max_graphs": 1}, "the 2 largest buckets, which cover every legal shape, need 0.8 s"),
        ({"max_graphs": 0}, "the table has no limit"),
        ({"max_compile_s": 0.5}, "max_compile_s = 0.5"),
        ({"max_graph_bytes": 1e6}, "max_graph_bytes = 1e+06"),
    ],
)
def test_impossible_config_says_what_to_do(trace, changes, said):
    with pytest.raises(ConfigError) as caught:
        Fitted(LIMITS, attrs.evolve(FittedConfig(trace=trace), **changes))
    assert said in str(caught.value)


def test_trace_without_a_phase_leaves_that_phase_its_largest_bucket(tmp_path):
    table = Fitted(LIMITS, record(tmp_path / "prefill.csv", [100, 200])).buckets(LIMITS)
    assert [bucket for bucket in table if bucket.phase is Phase.DECODE] == [Bucket(64, 1, 4096, Phase.DECODE)]


def test_factory_makes_the_strategy_with_its_config(trace):
    component = {item.name: item for item in trencadis_bucketings()}["fitted"]
    context = ComponentContext(clock=SimulatedClock(), seed=0, limits=LIMITS)
    strategy = component.factory(component.config(trace=trace, max_graphs=4), context)
    assert isinstance(strategy, Fitted)
    assert len(strategy.buckets(LIMITS)) == 4


def test_arrivals_and_the_shapes_they_cause_give_the_same_table(trace, tmp_path):
    from trencadis_gallery.bucketing.workloads.workload import write_shapes

    config = FittedConfig(trace=trace, max_graphs=12)
    workload: Workload = read_source(Path(trace)).workload(LIMITS, config.cost)
    write_shapes(tmp_path / "shapes.csv", workload)
    recorded = attrs.evolve(config, trace=str(tmp_path / "shapes.csv"))
    assert Fitted(LIMITS, recorded).buckets(LIMITS) == Fitted(LIMITS, config).buckets(LIMITS)


COST = DeviceCost()


def drawn(seed, phase=Phase.DECODE, num_points=12):
    """A problem with an irregular set of candidates over random points."""
    rng = random.Random(seed)
    points = {
        (rng.randint(1, 6), rng.randint(1, 3), rng.randint(1, 40)): rng.randint(1, 100) for _ in range(num_points)
    }
    corners = [tuple(max(pair) for pair in zip(*some, strict=True)) for some in itertools.combinations(points, 2)]
    others = rng.sample(sorted({*points, *corners}), 10)
    return Problem.of(points, [Bucket(6, 3, 40, phase)], others, COST)


def indices(problem, buckets):
    return [problem.candidates.index(bucket) for bucket in buckets]


def total_s(problems, chosen):
    return sum(time_s(problem, indices(problem, buckets)) for problem, buckets in zip(problems, chosen, strict=True))


def allowed(problems, budget):
    """All choices within a budget."""
    most = 6 if budget.max_graphs is None else budget.max_graphs - sum(item.num_tops for item in problems) + 1
    choices = [
        [
            (*range(item.num_tops), *some)
            for number in range(most)
            for some in itertools.combinations(_rest(item), number)
        ]
        for item in problems
    ]
    for choice in itertools.product(*choices):
        num_bytes = sum(problem.bytes[list(chosen)].sum() for problem, chosen in zip(problems, choice, strict=True))
        if budget.allows(sum(map(len, choice)), num_bytes):
            yield choice


def _rest(problem):
    return range(problem.num_tops, len(problem.candidates))


def best_s(problems, budget):
    return min(
        sum(time_s(problem, chosen) for problem, chosen in zip(problems, choice, strict=True))
        for choice in allowed(problems, budget)
    )


def test_time_is_that_of_the_fastest_chosen_bucket_of_each_point():
    for seed in range(40):
        problem = drawn(seed)
        chosen = [0, 2, 5]
        expected = 0.0
        for point, weight in enumerate(problem.weights):
            expected += weight * min(problem.times[item] for item in chosen if problem.covers[item, point])
        assert time_s(problem, chosen) == pytest.approx(expected), seed


@pytest.mark.parametrize("num_graphs", [2, 3, 5])
def test_greedy_saves_at_least_what_its_bound_promises(num_graphs):
    for seed in range(12):
        problem = drawn(seed)
        most_s = time_s(problem, [0])
        best_saving = most_s - best_s([problem], Budget(num_graphs, None))
        saving = most_s - total_s([problem], choose([problem], Budget(num_graphs, None)))
        assert saving >= (1 - 1 / math.e) * best_saving - 1e-12, seed
        # With swaps it is nearly always the best, which the bound alone would not show.
        assert saving >= 0.9 * best_saving, seed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_phases_share_one_budget(seed):
    problems = [drawn(seed, num_points=8), drawn(seed + 100, Phase.PREFILL, num_points=8)]
    budget = Budget(5, None)
    chosen = choose(problems, budget)
    assert sum(map(len, chosen)) <= 5
    most_s = sum(time_s(problem, [0]) for problem in problems)
    assert most_s - total_s(problems, chosen) >= 0.95 * (most_s - best_s(problems, budget))


@pytest.mark.parametrize("seed", range(20))
def test_memory_budget_is_kept_and_used_well(seed):
    problem = drawn(seed, Phase.PREFILL)
    spare = 0.5 * float(problem.bytes[1:].sum()) * random.Random(seed).random()
    budget = Budget(None, float(problem.bytes[0]) + spare)
    chosen = choose([problem], budget)
    assert problem.bytes[indices(problem, chosen[0])].sum() <= budget.max_bytes
    most_s = time_s(problem, [0])
    # Half of the bound for a number of buckets is what the better of both orders guarantees.
    best_saving = most_s - best_s([problem], budget)
    assert most_s - total_s([problem], chosen) >= (1 - 1 / math.e) / 2 * best_saving - 1e-12


@pytest.mark.parametrize("seed", range(10))
def test_time_never_rises_with_a_larger_budget(seed):
    problem = drawn(seed)
    times = [total_s([problem], choose([problem], Budget(number, None))) for number in range(1, 9)]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(times))


def test_largest_buckets_stay_even_where_they_help_nobody():
    problem = Problem.of(
        {(1, 1, 1): 5}, [Bucket(9, 1, 9, Phase.DECODE), Bucket(1, 9, 9, Phase.DECODE)], [(1, 1, 1)], COST
    )
    assert choose([problem], Budget(2, None)) == [list(problem.candidates[:2])]
    assert choose([problem], Budget(3, None)) == [list(problem.candidates)]


def test_bucket_that_saves_nothing_is_not_prepared():
    problem = Problem.of({(1, 1, 1): 5}, [Bucket(2, 1, 4, Phase.DECODE)], [(1, 1, 1), (1, 1, 2), (2, 1, 3)], COST)
    assert choose([problem], Budget(None, 1e12)) == [[Bucket(2, 1, 4, Phase.DECODE), Bucket(1, 1, 1, Phase.DECODE)]]


def test_problem_without_points_takes_no_budget():
    empty = Problem.of({}, [Bucket(2, 1, 4, Phase.DECODE)], [], COST)
    assert choose([empty, drawn(1)], Budget(6, None))[0] == [Bucket(2, 1, 4, Phase.DECODE)]


@pytest.mark.parametrize("seed", range(20))
def test_one_dimension_is_solved_exactly(seed):
    rng = random.Random(seed)
    points = {(1, 1, size): rng.randint(1, 50) for size in rng.sample(range(1, 60), 11)}
    problem = Problem.of(points, [Bucket(1, 1, 60, Phase.DECODE)], points, COST)
    assert problem.is_line
    number = rng.randint(2, 6)
    chosen = choose([problem], Budget(number, None))
    assert total_s([problem], chosen) == pytest.approx(best_s([problem], Budget(number, None)), rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_many_sizes_of_one_dimension_are_solved_exactly_too(seed):
    rng = random.Random(seed)
    points = {(1, 1, size): rng.randint(1, 50) for size in rng.sample(range(1, 400), 80)}
    problem = Problem.of(points, [Bucket(1, 1, 400, Phase.DECODE)], points, COST)
    sizes = sorted(points)
    costs = [COST.pass_s(Bucket(*size, Phase.DECODE)) for size in [*sizes, (1, 1, 400)]]
    weights = [points[size] for size in sizes] + [0]
    kept = optimal_sizes(costs, weights, 14)
    best = sum(weight * costs[min(k for k in kept if k >= place)] for place, weight in enumerate(weights))
    assert total_s([problem], choose([problem], Budget(14, None))) == pytest.approx(best, rel=1e-12)


def test_small_graphs_that_save_more_together_are_taken_before_a_large_one():
    """The large one saves most, and leaves no memory for the two others."""
    points = {(1, 1000, 0): 10, (1, 500, 30): 8, (1, 400, 60): 8}
    problem = Problem.of(points, [Bucket(1, 2000, 64)], points, COST)
    chosen = choose([problem], Budget(None, float(problem.bytes[0]) + 1000 * COST.prefill_graph_bytes))
    assert sorted(chosen[0]) == [Bucket(1, 400, 60), Bucket(1, 500, 30), Bucket(1, 2000, 64)]


def test_budget_allows_up_to_its_limits():
    assert Budget(2, 10.0).allows(2, 10.0)
    assert not Budget(2, 10.0).allows(3, 1.0)
    assert not Budget(2, 10.0).allows(1, 10.5)
    assert Budget(None, None).allows(10**9, np.inf)
