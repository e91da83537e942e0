from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.clock import SimulatedClock, SystemClock
from trencadis.errors import BackendError
from trencadis.records import Bucket, Phase, SamplingParams, Shape, UnifiedBucket, UnifiedShape
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.graphs.capture import Capture
from trencadis_gaudi.graphs.counts import Watch
from trencadis_gaudi.graphs.sampler_warmup import CONFIGURATIONS, dummy_drafts, sampler_sizes, warm_up_sampler
from trencadis_gaudi.graphs.warmup import Pace, WarmUp, compile_only, every_graph, representatives, required_first
from trencadis_gaudi.habana import load_habana
from trencadis_gaudi.runner import empty_pass
from trencadis_testing.doubles import Matching

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


def test_what_covers_all_others_is_required_however_few_are_asked_for_and_the_rest_waits_for_a_quiet_moment():
    backend = FakeBackend(warmup_required=1, warmup_quiet_s=2.0, hot_replay=False)
    assert set(backend.warm_up.run(BUCKETS).prepared) == {PREFILLS[2], DECODES[2]}
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
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=8, automatic_dynamic_shapes=False):
        compile_for(range(8))
        with pytest.raises(BackendError, match="gave up"):
            compile_for([8])
        FakeBackend(mode="compile", regional=False).warm_up.run(BUCKETS)
        compile_for(range(8, 9 + len(BUCKETS)))
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


def test_smallest_middling_and_largest_represent_a_phase():
    for count, expected in ((0, []), (1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (9, [0, 4, 8])):
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
    for advance_s, allowed in ((0.0, False), (0.99, False), (0.01, True)):
        if not advance_s:
            pace.stepped()
        clock.advance(advance_s)
        assert [pace.allows(is_idle=True) for _ in range(2)] == [allowed] * 2, "asking changes nothing"


def test_steps_save_until_a_piece_is_paid_for_and_idle_work_spends_nothing_of_it():
    generous, none = make(step_s=0.2)[0], make()[0]
    allowed = []
    for _ in range(3):
        generous.stepped()
        none.stepped()
        allowed.append(generous.allows(is_idle=False))
    assert (allowed, none.allows(is_idle=False)) == ([False, False, True], False)
    generous.took(0.4, is_idle=True)
    assert generous.allows(is_idle=False)
    generous.took(0.5, is_idle=False)
    assert not generous.allows(is_idle=False)


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


def test_sizes_are_rows_and_logits_of_each_of_every_bucket_once():
    buckets = [Bucket(1, 128, 0), Bucket(1, 256, 2), Bucket(4, 1, 8, Phase.DECODE), Bucket(4, 1, 16, Phase.DECODE)]
    assert sampler_sizes(buckets) == [(1, 1), (4, 1)]
    assert sampler_sizes([*buckets, Bucket(4, 3, 16, Phase.DECODE)]) == [(1, 1), (4, 1), (4, 3)]


def test_rule_that_reads_distributions_is_shown_drafts_that_were_drawn_too():
    class Reads(Matching):
        needs_distributions = True

    assert dummy_drafts(4, 1, vocab_size=9, rule=Reads()) == (None,)
    assert dummy_drafts(4, 3, vocab_size=9, rule=Matching()) == (None,)
    none, drawn = dummy_drafts(4, 3, vocab_size=9, rule=Reads())
    assert none is None
    assert drawn.num_drafts.tolist() == [2] * 4
    assert len(drawn.token_ids) == len(drawn.distributions.rows) == 8
    assert drawn.distributions.probabilities.shape == (1, 9)
    assert float(drawn.distributions.probabilities.sum()) == pytest.approx(1)


def test_twelve_configurations_are_logged_in_the_vendors_order_and_words(caplog):
    caplog.set_level("INFO", logger="trencadis.gaudi")
    warm_up_sampler([(1, 1), (138, 1)], (), sample=lambda *_: None)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "Warming up sampler with batch sizes: [1, 138] and following configs:"
    assert lines[1] == "temp=0.0, top_p=1.0, top_k=0, batch_changed=True"
    assert lines[6] == "temp=0.8, top_p=0.85, top_k=0, batch_changed=True"
    assert lines[7] == "temp=0.0, top_p=1.0, top_k=0, batch_changed=False"
    assert lines[13:] == ["Starting sampler warmup...", "Sampler warmup completed successfully"]


def test_every_configuration_runs_changed_and_unchanged_and_every_path_once():
    seen = []
    paths = (SamplingParams(top_k=3), SamplingParams(logprobs=1))
    number = warm_up_sampler([(1, 1), (4, 2)], paths, sample=lambda *call: seen.append(call))
    assert number == len(seen) == 2 * (12 + 2)
    of_four = [params for batch_size, steps, params in seen if (batch_size, steps) == (4, 2)]
    assert of_four[1] is None
    assert [(one.temperature, one.top_p, one.top_k) for one in of_four[0:12:2]] == list(CONFIGURATIONS)
    assert of_four[12:] == list(paths)


PROMPT, EIGHT = Bucket(1, 512, 4), Bucket(8, 1, 24, Phase.DECODE)


@pytest.fixture
def habana():
    return load_habana(GaudiConfig(device="emulated", mode="lazy"), clock=SystemClock())


def watch_of(habana, **options):
    return Watch(habana, **{"counts_compilations": True, "logs_passes": False, **options})


def one_pass(bucket, *query_lens):
    return attrs.evolve(empty_pass(bucket), query_lens=np.array(query_lens, np.int32))


def test_bucket_that_was_not_warmed_up_is_warned_about_once_in_the_vendors_words(habana, caplog):
    watch = watch_of(habana)
    watch.warmed_up(EIGHT)
    for _ in range(3):
        watch.note(one_pass(PROMPT, 300))
        watch.note(one_pass(EIGHT, 1))
    assert [record.getMessage() for record in caplog.records] == [
        "Configuration: ('prompt', 1, 512, 4) was not warmed-up!"
    ]
    assert watch.num_unwarmed == 1


def test_unified_bucket_is_named_with_shared_and_unique_blocks(habana, caplog):
    watch = watch_of(habana)
    watch.warmed_up(UnifiedBucket(8, 4, 9, False))
    for bucket in (UnifiedBucket(8, 4, 9, False), UnifiedBucket(8, 4, 10, False), UnifiedBucket(8, 4, 9, True)):
        watch.note(one_pass(bucket, 1, 1))
    assert [record.getMessage() for record in caplog.records] == [
        "Configuration: (query, shared_blocks, unique_blocks) (8, 4, 10), (not causal) was not warmed-up!",
        "Configuration: (query, shared_blocks, unique_blocks) (8, 4, 9), (causal) was not warmed-up!",
    ]


def test_passes_are_logged_on_request(habana, caplog):
    caplog.set_level("INFO", logger="trencadis.gaudi")
    watch = watch_of(habana, logs_passes=True)
    watch.warmed_up(EIGHT)
    watch.note(one_pass(EIGHT, 1))
    assert "[fwd] ('decode', 8, 1, 24)" in caplog.text


def test_compilations_of_a_block_are_counted_and_warned_about(habana, caplog):
    watch = watch_of(habana)
    with watch.compilations(warns=False) as expected:
        habana.emulated.need_recipe(b"a", what="A")
    assert (expected.number, watch.num_recompilations, caplog.text) == (1, 0, "")
    with watch.compilations() as found:
        habana.emulated.need_recipe(b"a", what="A")
        habana.emulated.need_recipe(b"b", what="B")
    assert (found.number, watch.num_recompilations) == (1, 1)
    assert "graph compilation detected: [('TotalNumber', 1)" in caplog.text


def test_nothing_is_counted_if_nobody_asks(habana):
    watch = watch_of(habana, counts_compilations=False)
    with watch.compilations() as found:
        habana.emulated.need_recipe(b"a", what="A")
    assert found.number == watch.num_recompilations == 0


def test_metrics_show_padding_by_phase_hits_by_bucket_and_graphs(habana):
    watch = watch_of(habana)
    watch.warmed_up(EIGHT)
    watch.note(one_pass(PROMPT, 300))
    watch.note(one_pass(EIGHT, 1, 1, 1))
    watch.note(one_pass(EIGHT, 1, 1))
    watch.graphs(7, 4096)
    text = watch.metrics()
    for line in (
        'trencadis_gaudi_positions_total{kind="padding",phase="prompt"} 212.0',
        'trencadis_gaudi_positions_total{kind="real",phase="decode"} 5.0',
        'trencadis_gaudi_positions_total{kind="padding",phase="decode"} 11.0',
        'trencadis_gaudi_bucket_passes_total{batch_size="8",num_blocks="24",phase="decode",query_len="1"} 2.0',
        "trencadis_gaudi_unwarmed_buckets_total 1.0",
        "trencadis_gaudi_recompilations_total 0.0",
        "trencadis_gaudi_graphs 7.0",
        "trencadis_gaudi_graph_bytes 4096.0",
    ):
        assert line in text
