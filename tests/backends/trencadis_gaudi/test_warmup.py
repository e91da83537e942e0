from __future__ import annotations

import contextlib
from types import SimpleNamespace

import attrs
import pytest

from trencadis.clock import SimulatedClock
from trencadis.records import Bucket, Phase
from trencadis_gaudi.capture import Capture
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.habana import load_habana
from trencadis_gaudi.warmup import WarmUp, compile_only, representatives
from trencadis_gaudi.watch import Watch

PREFILLS = [Bucket(1, query, 0) for query in (128, 256, 512)]
DECODES = [Bucket(batch, 1, 8, Phase.DECODE) for batch in (1, 2, 4)]
BUCKETS = [*PREFILLS, *DECODES]


class Desk:
    """A backend's part of the warm-up: notes what it is told, and takes a second for each."""

    def __init__(self, **options):
        self.config = GaudiConfig(device="emulated", **options)
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


def test_order_is_sampler_swaps_prefills_decodes_largest_first_then_a_hot_replay():
    desk = Desk()
    report = desk.warm_up.run(BUCKETS)
    cold = [(bucket, True) for bucket in (*PREFILLS[::-1], *DECODES[::-1])]
    assert desk.log[:2] == ["sampler", "swaps"]
    assert desk.log[2:8] == cold
    assert desk.log[8:] == [(bucket, True) for bucket in (*PREFILLS, *DECODES)]
    assert desk.compiles_only == [True] * 6 + [False] * 6
    assert set(report.prepared) == set(BUCKETS)
    assert (report.num_graphs, report.num_compilations) == (6, 6)


def test_lines_are_the_vendors(caplog):
    caplog.set_level("INFO", logger="trencadis.gaudi")
    Desk(hot_replay=False).warm_up.run(BUCKETS)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "Warm-up of 6 buckets: about 2 s, at 0.4 s each (backend.gaudi.expected_graph_s)."
    assert lines[1] == "[Warmup][Prompt][1/3] batch_size:1 query_len:512 num_blocks:0 free_mem:16 GiB"
    assert lines[6] == "[Warmup][Decode][3/3] batch_size:1 query_len:1 num_blocks:8 free_mem:16 GiB"
    assert lines[7:9] == ["Graph/Prompt captured:3 used_mem:0 B", "Graph/Decode captured:3 used_mem:0 B"]
    assert lines[9] == "Warmup finished in 6 secs, allocated 0 B of device memory"


def test_eager_mode_prepares_nothing_and_counts_all_as_ready(caplog):
    caplog.set_level("INFO", logger="trencadis.gaudi")
    desk = Desk(mode="eager")
    report = desk.warm_up.run(BUCKETS)
    assert desk.log == []
    assert set(report.prepared) == set(BUCKETS)
    assert caplog.text.count("\n") == 1
    assert "Warmup finished in 0 secs" in caplog.text


def test_budgeted_capture_runs_every_bucket_without_a_graph_first():
    desk = Desk(capture="budgeted", hot_replay=False)
    desk.warm_up.run(BUCKETS)
    assert desk.log[2:8] == [(bucket, False) for bucket in (*PREFILLS[::-1], *DECODES[::-1])]
    assert desk.log[8:] == [(bucket, True) for bucket in (*PREFILLS, *DECODES[::-1])]


def test_rest_behind_the_required_buckets_is_prepared_one_at_a_time():
    desk = Desk(warmup_required=2, hot_replay=False)
    report = desk.warm_up.run(BUCKETS)
    assert set(report.prepared) == {PREFILLS[2], PREFILLS[1]}
    for _ in range(6):
        desk.warm_up.continue_with_one()
    assert {bucket for bucket, _ in desk.log[2:]} == set(BUCKETS)
    assert len(desk.log[2:]) == 6
    assert desk.watch.num_recompilations == 0


def test_progress_counts_up_to_all():
    seen = []
    Desk().warm_up.run(BUCKETS, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 6) for done in range(1, 7)]


def test_limits_of_torch_compile_are_raised_for_the_number_of_buckets(monkeypatch):
    import torch._dynamo.config as dynamo

    with dynamo.patch(cache_size_limit=8, accumulated_cache_size_limit=256):
        Desk(mode="compile").warm_up.run(BUCKETS)
        assert (dynamo.cache_size_limit, dynamo.accumulated_cache_size_limit) == (31, 256)


def test_old_bridge_compiles_and_runs_with_a_warning(caplog):
    @contextlib.contextmanager
    def env_setting(name, value):
        raise KeyError(name)
        yield

    internal = SimpleNamespace(bridge_config=SimpleNamespace(env_setting=env_setting))
    ran = []
    with compile_only(attrs.evolve(Desk().habana, internal=internal)):
        ran.append(1)
    assert ran == [1]
    assert "Cannot use PT_COMPILE_ONLY_MODE. Warmup time will be negatively impacted." in caplog.text


def test_error_within_compile_only_mode_ends_the_mode():
    habana = Desk().habana
    with pytest.raises(KeyError, match="mine"), compile_only(habana):
        raise KeyError("mine")
    assert not habana.internal.bridge_config.get_pt_compile_only_mode()


@pytest.mark.parametrize(("count", "expected"), [(0, []), (1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (9, [0, 4, 8])])
def test_smallest_middling_and_largest_represent_a_phase(count, expected):
    buckets = [Bucket(1, 16 * (n + 1), 0) for n in range(count)]
    assert representatives(buckets[::-1]) == [buckets[n] for n in expected]
