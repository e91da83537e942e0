from __future__ import annotations

import csv
from pathlib import Path

import attrs
import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import ConfigError, ConfigValueError
from trencadis.interfaces import ComponentContext
from trencadis.records import Bucket, BucketLimits, Phase, Shape
from trencadis_plugins.bucketing import trencadis_bucketings
from trencadis_plugins.bucketing.exponential import Exponential
from trencadis_plugins.bucketing.fitted import Fitted
from trencadis_plugins.bucketing.fitted_config import FittedConfig
from trencadis_plugins.bucketing.from_file import read_bucket_file
from trencadis_plugins.bucketing.workloads import DeviceCost, Workload
from trencadis_plugins.bucketing.workloads.bucket_file import write_bucket_file
from trencadis_plugins.bucketing.workloads.workload import read_source
from trencadis_testing.bucketing import SAMPLE_LIMITS, BucketingConformance
from trencadis_tools.buckets import measure

CONVERSATION = Path(__file__).parents[5] / "shared" / "data" / "traces" / "azure_llm_2023_conv.csv"

LIMITS = BucketLimits(
    block_size=128,
    max_model_len=8192,
    max_num_seqs=64,
    max_num_batched_tokens=8192,
    max_prefill_batch_size=1,
    num_blocks=4000,
    contiguous=False,
    prefix_caching=True,
    max_draft_tokens=0,
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


@pytest.mark.parametrize("name", SAMPLE_LIMITS)
def test_largest_buckets_are_always_there(trace, name):
    limits = SAMPLE_LIMITS[name]
    table = Fitted(limits, FittedConfig(trace=trace, max_graphs=8)).buckets(limits)
    assert len(table) <= 8
    most = min(limits.max_num_batched_tokens, limits.max_model_len)
    assert any(bucket.covers(Shape(1, most, -(-(limits.max_model_len - 1) // limits.block_size))) for bucket in table)
    most_blocks = limits.num_blocks
    if not limits.contiguous:
        most_blocks = min(3 * most_blocks, limits.max_num_seqs * limits.max_blocks_per_sequence)
    assert any(bucket.covers(Shape(limits.max_num_seqs, 1, most_blocks, Phase.DECODE)) for bucket in table)


def test_two_fits_of_the_same_trace_are_equal(trace):
    config = FittedConfig(trace=trace, max_graphs=16)
    assert Fitted(LIMITS, config).buckets(LIMITS) == Fitted(LIMITS, config).buckets(LIMITS)


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


def test_written_table_reads_back(trace, tmp_path):
    table = Fitted(LIMITS, FittedConfig(trace=trace, max_graphs=16)).buckets(LIMITS)
    write_bucket_file(tmp_path / "buckets.txt", table)
    assert read_bucket_file(tmp_path / "buckets.txt", strict=True) == table


def test_shape_beyond_three_caches_gets_a_fallback_that_covers_it(trace):
    limits = attrs.evolve(LIMITS, num_blocks=100)
    shape = Shape(64, 1, 2000, Phase.DECODE)
    strategy = Fitted(limits, FittedConfig(trace=trace))
    assert strategy.bucket_for(shape).covers(shape)
    assert strategy.bucket_for(shape) not in strategy.buckets(limits)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trace": ""}, 'trace = "": there is nothing to learn from'),
        ({"max_graphs": 1}, "the 2 largest buckets, which cover every legal shape, need 0.8 s"),
        ({"max_graphs": 0}, "the table has no limit"),
        ({"max_compile_s": 0.5}, "max_compile_s = 0.5"),
        ({"max_graph_bytes": 1e6}, "max_graph_bytes = 1e+06"),
    ],
)
def test_impossible_config_says_what_to_do(trace, changes, said):
    with pytest.raises(ConfigValueError) as caught:
        Fitted(LIMITS, attrs.evolve(FittedConfig(trace=trace), **changes))
    assert said in str(caught.value)


def test_missing_trace_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no such trace file"):
        Fitted(LIMITS, FittedConfig(trace=str(tmp_path / "nope.csv")))


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
    from trencadis_plugins.bucketing.workloads.workload import write_shapes

    config = FittedConfig(trace=trace, max_graphs=12)
    workload: Workload = read_source(Path(trace)).workload(LIMITS, config.cost)
    write_shapes(tmp_path / "shapes.csv", workload)
    recorded = attrs.evolve(config, trace=str(tmp_path / "shapes.csv"))
    assert Fitted(LIMITS, recorded).buckets(LIMITS) == Fitted(LIMITS, config).buckets(LIMITS)
