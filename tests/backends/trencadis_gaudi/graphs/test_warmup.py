from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace

import attrs
import pytest
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.clock import SimulatedClock
from trencadis.errors import BackendError
from trencadis.records import Bucket, Phase, Shape, UnifiedBucket, UnifiedShape
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.graphs.capture import Capture
from trencadis_gaudi.graphs.counts import Watch
from trencadis_gaudi.graphs.warmup import Pace, WarmUp, compile_only, every_graph, representatives, required_first
from trencadis_gaudi.habana import load_habana

PREFILLS = [Bucket(1, query, 0) for query in (128, 256, 512)]
DECODES = [Bucket(batch, 1, 8, Phase.DECODE) for batch in (1, 2, 4)]
BUCKETS = [*PREFILLS, *DECODES]


class FakeBackend:
    """A backend's part of the warm-up: notes what it is told, and takes a second for each."""

    def __init__(self, **options):
        self.config = GaudiConfig(device="emulated", **{"mode": "lazy", **options})
        self.clock = SimulatedClock()
        self.habana = load_habana(self.config, clock=self.clock)
        self.log = []
        self.compiles_only = []
        self.watch = Watch(self.habana, counts_compilations=True, logs_passes=False)
        self.capture = Capture(self.config, self.habana, run=self.run_bucket, margin_bytes=0, clear=lambda: None)
        self.warm_up = WarmUp(
            self.config, self.habana, capture=self.capture, watch=self.watch, clock=self.clock, steps=self
        )

    def run_bucket(self, bucket, graph):
        self.habana.emulated.need_recipe(repr((bucket, graph)).encode(), what="it")
        self.compiles_only.append(self.habana.internal.bridge_config.get_pt_compile_only_mode())
        self.log.append((bucket, graph))
        self.clock.advance(1)

    def warm_sampler(self, buckets):
        self.log.append("sampler")

    def warm_swaps(self):
        self.log.append("swaps")

    num_text_sizes = 0

    def warm_embedder(self):
        pass


def test_order_is_sampler_swaps_prefills_decodes_largest_first_then_a_hot_replay():
    backend = FakeBackend()
    report = backend.warm_up.run(BUCKETS)
    cold = [(bucket, True) for bucket in (*PREFILLS[::-1], *DECODES[::-1])]
    assert backend.log[:2] == ["sampler", "swaps"]
    assert backend.log[2:8] == cold
    assert backend.log[8:] == [(bucket, True) for bucket in (*PREFILLS, *DECODES)]
    assert backend.compiles_only == [True] * 6 + [False] * 6
    assert set(report.prepared) == set(BUCKETS)
    assert (report.num_graphs, report.num_compilations) == (6, 6)


def test_lines_are_the_vendors(caplog):
    caplog.set_level("INFO", logger="trencadis.gaudi")
    FakeBackend(hot_replay=False).warm_up.run(BUCKETS)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "Warm-up of 6 buckets: about 2 s, at 0.4 s each (backend.gaudi.expected_graph_s)."
    assert lines[1] == "[Warmup][Prompt][1/3] batch_size:1 query_len:512 num_blocks:0 free_mem:16 GiB"
    assert lines[6] == "[Warmup][Decode][3/3] batch_size:1 query_len:1 num_blocks:8 free_mem:16 GiB"
    assert lines[7:9] == ["Graph/Prompt captured:3 used_mem:0 B", "Graph/Decode captured:3 used_mem:0 B"]
    assert lines[9] == "Warmup finished in 6 secs, allocated 0 B of device memory"


def test_eager_mode_prepares_nothing_and_counts_all_as_ready(caplog):
    caplog.set_level("INFO", logger="trencadis.gaudi")
    backend = FakeBackend(mode="eager")
    report = backend.warm_up.run(BUCKETS)
    assert backend.log == []
    assert set(report.prepared) == set(BUCKETS)
    assert caplog.text.count("\n") == 1
    assert "Warmup finished in 0 secs" in caplog.text


def test_budgeted_capture_runs_every_bucket_without_a_graph_first():
    backend = FakeBackend(capture="budgeted", hot_replay=False)
    backend.warm_up.run(BUCKETS)
    assert backend.log[2:8] == [(bucket, False) for bucket in (*PREFILLS[::-1], *DECODES[::-1])]
    assert backend.log[8:] == [(bucket, True) for bucket in (*PREFILLS, *DECODES[::-1])]


def test_rest_behind_the_required_buckets_is_prepared_one_at_a_time(caplog):
    caplog.set_level("INFO", logger="trencadis.gaudi")
    backend = FakeBackend(warmup_required=3, hot_replay=False)
    report = backend.warm_up.run(BUCKETS)
    assert set(report.prepared) == {PREFILLS[2], PREFILLS[1], DECODES[2]}
    assert report.num_deferred == 3
    ready = [backend.warm_up.rest(is_idle=True) for _ in range(5)]
    assert [len(some) for some in ready] == [1, 1, 1, 0, 0]
    assert {bucket for bucket, _ in backend.log[2:]} == set(BUCKETS)
    assert len(backend.log[2:]) == 6
    assert backend.watch.num_recompilations == 0
    assert backend.capture.graphs.keys() == set(BUCKETS)
    assert "[Warmup][Decode][6/6] batch_size:1 query_len:1 num_blocks:8 free_mem:16 GiB" in caplog.text
    text = backend.watch.metrics()
    assert "trencadis_gaudi_graphs 6.0" in text
    assert 'trencadis_gaudi_warmup_buckets{state="deferred"} 0.0' in text
    assert "trencadis_gaudi_warmup_seconds_total 6.0" in text


def test_required_buckets_include_those_that_cover_all_others_however_few_are_asked_for():
    backend = FakeBackend(warmup_required=1, hot_replay=False)
    assert set(backend.warm_up.run(BUCKETS).prepared) == {PREFILLS[2], DECODES[2]}


def test_rest_waits_for_a_quiet_moment():
    backend = FakeBackend(warmup_required=1, warmup_quiet_s=2.0, hot_replay=False)
    backend.warm_up.run(BUCKETS)
    backend.warm_up.pace.stepped()
    assert backend.warm_up.rest(is_idle=True) == ()
    assert backend.warm_up.rest(is_idle=False) == ()
    backend.clock.advance(2)
    assert len(backend.warm_up.rest(is_idle=True)) == 1


@pytest.mark.parametrize("number", [2, 4])
def test_rest_for_which_memory_is_short_runs_without_a_graph(number, caplog):
    """The margin is gone when the graph with this number is captured; an engine that serves goes on."""
    backend = FakeBackend(warmup_required=2, hot_replay=False, on_memory_shortage="fail")
    backend.warm_up.run(BUCKETS)
    backend.habana.emulated.total_bytes = number
    backend.capture._margin = 1
    monitor = backend.habana.emulated
    backend.run_bucket = lambda bucket, graph: (
        backend.log.append((bucket, graph)),
        monitor.book(repr(bucket), int(graph)),
    )
    backend.capture._run = lambda bucket, graph: backend.run_bucket(bucket, graph)
    while backend.warm_up.rest(is_idle=True):
        pass
    late = backend.log[4:]
    assert [graph for _, graph in late if graph] == [True] * number
    assert len({bucket for bucket, _ in late}) == 4
    assert caplog.text.count("It runs without a graph.") == 1


def test_progress_counts_up_to_all():
    seen = []
    FakeBackend().warm_up.run(BUCKETS, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 6) for done in range(1, 7)]


def test_limits_of_torch_compile_are_raised_for_the_number_of_buckets():
    import torch
    import torch._dynamo.config as dynamo

    torch._dynamo.reset()
    with dynamo.patch(cache_size_limit=8, accumulated_cache_size_limit=256):
        FakeBackend(mode="compile").warm_up.run(BUCKETS)
        assert (dynamo.cache_size_limit, dynamo.accumulated_cache_size_limit) == (31, 256)


def test_an_engine_may_compile_all_of_its_graphs_however_many_its_process_compiled_before():
    """torch.compile counts for good how often a piece of code was compiled, and stops at its limit."""
    import torch

    def add(values, number):
        return values + number

    def compile_for(numbers):
        with every_graph():
            for number in numbers:
                compiled = torch.compile(add, backend="eager", dynamic=False)
                assert compiled(torch.zeros(2), number).tolist() == [number, number]

    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=30, accumulated_recompile_limit=30, automatic_dynamic_shapes=False):
        compile_for(range(30))
        with pytest.raises(BackendError, match="gave up"):
            compile_for([30])
        FakeBackend(mode="compile", regional=False).warm_up.run(BUCKETS)
        compile_for(range(30, 31 + len(BUCKETS)))
    torch._dynamo.reset()


def test_old_bridge_compiles_and_runs_with_a_warning(caplog):
    @contextlib.contextmanager
    def env_setting(name, value):
        raise KeyError(name)
        yield

    internal = SimpleNamespace(bridge_config=SimpleNamespace(env_setting=env_setting))
    ran = []
    with compile_only(attrs.evolve(FakeBackend().habana, internal=internal)):
        ran.append(1)
    assert ran == [1]
    assert "Cannot use PT_COMPILE_ONLY_MODE. Warmup time will be negatively impacted." in caplog.text


def test_error_within_compile_only_mode_ends_the_mode():
    habana = FakeBackend().habana
    with pytest.raises(KeyError, match="mine"), compile_only(habana):
        raise KeyError("mine")
    assert not habana.internal.bridge_config.get_pt_compile_only_mode()


SIZES = st.integers(1, 4)
PADDED = st.builds(Bucket, SIZES, SIZES, SIZES, st.sampled_from(Phase))
UNIFIED = st.builds(UnifiedBucket, SIZES, SIZES, SIZES, st.booleans())


@pytest.mark.parametrize(("count", "expected"), [(0, []), (1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (9, [0, 4, 8])])
def test_smallest_middling_and_largest_represent_a_phase(count, expected):
    buckets = [Bucket(1, 16 * (n + 1), 0) for n in range(count)]
    assert representatives(buckets[::-1]) == [buckets[n] for n in expected]


@settings(max_examples=60, phases=(Stage.explicit, Stage.generate))
@given(st.one_of(st.lists(PADDED, max_size=12, unique=True), st.lists(UNIFIED, max_size=12, unique=True)))
def test_every_bucket_is_covered_by_one_of_those_in_front_and_none_of_these_by_another(buckets):
    order, num_front = required_first(buckets)
    front = order[:num_front]
    assert sorted(map(repr, order)) == sorted(map(repr, buckets))
    for bucket in buckets:
        assert any(one.covers(shape_of(bucket)) for one in front)
    for one in front:
        assert not any(other.covers(shape_of(one)) for other in front if other != one)


def test_largest_follow_those_in_front():
    buckets = [Bucket(1, query, 0) for query in (128, 512, 256)]
    assert required_first(buckets) == ([buckets[1], buckets[2], buckets[0]], 1)


def shape_of(bucket):
    if isinstance(bucket, UnifiedBucket):
        return UnifiedShape(bucket.query_len, bucket.num_blocks, bucket.num_unique_blocks, bucket.is_causal)
    return Shape(bucket.batch_size, bucket.query_len, bucket.num_blocks, bucket.phase)


def make(**options):
    clock = SimulatedClock()
    return Pace(clock, **{"quiet_s": 1.0, "step_s": 0.0, "expected_s": 0.5, **options}), clock


def test_idle_from_the_start_and_again_when_no_step_ran_for_long_enough():
    pace, clock = make()
    assert pace.allows(is_idle=True)
    pace.stepped()
    assert not pace.allows(is_idle=True)
    clock.advance(0.99)
    assert not pace.allows(is_idle=True)
    clock.advance(0.01)
    assert pace.allows(is_idle=True)


def test_steps_give_nothing_by_default():
    pace, _ = make()
    for _ in range(100):
        pace.stepped()
    assert not pace.allows(is_idle=False)


def test_steps_save_until_a_piece_is_paid_for():
    pace, _ = make(step_s=0.2)
    allowed = []
    for _ in range(3):
        pace.stepped()
        allowed.append(pace.allows(is_idle=False))
    assert allowed == [False, False, True]
    pace.took(0.5, is_idle=False)
    assert not pace.allows(is_idle=False)


def test_idle_work_spends_nothing_that_steps_saved():
    pace, _ = make(step_s=0.5)
    pace.stepped()
    pace.took(0.4, is_idle=True)
    assert pace.allows(is_idle=False)


@settings(max_examples=50, phases=(Stage.explicit, Stage.generate))
@given(st.lists(st.floats(0.01, 2.0), min_size=1, max_size=20), st.floats(0.01, 0.5))
def test_work_behind_steps_takes_their_share_of_time_and_one_piece_more_at_most(pieces, step_s):
    pace, _ = make(step_s=step_s, expected_s=pieces[0])
    num_steps, spent_s, left = 0, 0.0, list(pieces)
    while left and num_steps < 1000:
        pace.stepped()
        num_steps += 1
        if pace.allows(is_idle=False):
            took_s = left.pop(0)
            pace.took(took_s, is_idle=False)
            spent_s += took_s
            # A piece may take longer than the one before: then what it took too much is not asked back.
            surprise_s = sum(max(0.0, b - a) for a, b in itertools.pairwise(pieces))
            assert spent_s <= num_steps * step_s + surprise_s + 1e-9
    assert spent_s > 0 or num_steps * step_s < pieces[0]


@pytest.mark.parametrize("is_idle", [True, False])
def test_asking_changes_nothing(is_idle):
    pace, _ = make(step_s=1.0)
    pace.stepped()
    assert pace.allows(is_idle=is_idle) == pace.allows(is_idle=is_idle)


@pytest.mark.parametrize("name", ["FailOnRecompileLimitHit", "FailOnCacheLimitHit"])
def test_torch_compile_that_gives_up_is_an_error_by_whatever_name_pytorch_has(name, monkeypatch):
    from torch._dynamo import config as dynamo
    from torch._dynamo import exc

    class GivesUpError(Exception):
        pass

    def give_up():
        assert dynamo.fail_on_cache_limit_hit
        raise GivesUpError("limit")

    monkeypatch.delattr(exc, "FailOnRecompileLimitHit")
    monkeypatch.setattr(exc, name, GivesUpError, raising=False)
    with pytest.raises(BackendError, match="gave up during the warm-up: limit"), every_graph():
        give_up()
    assert not dynamo.fail_on_cache_limit_hit
