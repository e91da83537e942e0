"""Each check notices the fault that it is for, and no other check does; faults are planted in the emulated device or in the backend."""

from __future__ import annotations

import contextlib
import io
import json
from types import SimpleNamespace

import attrs
import pytest
import torch

from support.backends import gaudi_engines
from trencadis_gaudi.attention.fused_sdpa import emulated_fused_sdpa
from trencadis_gaudi.block_swaps import BlockSwaps
from trencadis_gaudi.checks import cards, child, engine, graphs, operations
from trencadis_gaudi.checks.bench import Bench
from trencadis_gaudi.checks.records import Found, Status
from trencadis_gaudi.checks.table import GROUPS, TABLE, checks_of
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.emulated import operations as emulated_operations
from trencadis_gaudi.emulated import recorder
from trencadis_gaudi.flat_cache import FlatLayer
from trencadis_gaudi.fp8 import linear

MODES = ("lazy", "compile", "eager")


class Over:
    """An object of the Gaudi software with some names replaced; None takes one away."""

    def __init__(self, original, **replaced):
        self._original, self._replaced = original, replaced

    def __getattr__(self, name):
        found = self._replaced[name] if name in self._replaced else getattr(self._original, name)
        if found is None:
            raise AttributeError(name)
        return found


def bench_of(mode, **replaced):
    """A bench on the emulated device; ``hpu``, ``core`` and ``internal`` are made of what is there."""
    bench = Bench(GaudiConfig(device="emulated", mode=mode))
    habana = bench.habana
    changes = {name: make(getattr(habana, name)) for name, make in replaced.items()}
    bench.habana = attrs.evolve(habana, **changes)
    return bench


def run(monkeypatch, mode, bench=None):
    """Run every check of a mode but those of an engine; returns those that do not hold, by name."""
    bench = bench or bench_of(mode)
    monkeypatch.setattr("trencadis_gaudi.checks.bench.Bench", lambda config: bench)
    lines = io.StringIO()
    checks = [check for check in checks_of(mode) if not check.run.startswith("engine.")]
    child.run_checks(checks, mode, bench.config, lines)
    found = [json.loads(line) for line in lines.getvalue().splitlines()]
    ended = {line["ended"]: line for line in found if "ended" in line}
    assert len(ended) == len(checks)
    return {name: line["text"] for name, line in ended.items() if line["holds"] is False}


def test_each_check_of_the_table_has_a_function_a_name_of_its_own_and_a_meaning():
    assert len({check.name for check in TABLE}) == len(TABLE)
    for check in TABLE:
        assert callable(check.function())
        assert set(check.groups) <= set(GROUPS)
        assert all(text.strip() for text in (check.does, check.expects, check.means))


def test_fact_that_does_not_hold_fails_or_is_doubtful():
    vital, other = (next(check for check in TABLE if check.is_vital is is_vital) for is_vital in (True, False))
    assert vital.result("lazy", Found(False, "")).status is Status.FAIL
    assert other.result("lazy", Found(False, "")).status is Status.WARN
    assert vital.result("lazy", Found(None, "")).status is Status.SKIP


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_fact_holds_on_the_emulated_device(monkeypatch, mode):
    assert run(monkeypatch, mode) == {}


def stale_replays(hpu):
    def wrap(module, **options):
        graphed, results = hpu.wrap_in_hpu_graph(module, **options), {}
        captured = graphed.forward

        def forward(x, slots):
            if x.shape not in results:
                results[x.shape] = captured(x, slots)
            return results[x.shape]

        graphed.forward = forward
        return graphed

    return Over(hpu, wrap_in_hpu_graph=wrap)


def unknown_flag(_):
    def env_setting(name, value):
        raise KeyError(name)

    return SimpleNamespace(bridge_config=SimpleNamespace(env_setting=env_setting))


def metric_of(name, stats):
    def plant(hpu):
        @contextlib.contextmanager
        def planted(asked):
            with hpu.metrics.metric_localcontext(asked) as metric:
                yield SimpleNamespace(stats=lambda: stats) if asked == name else metric

        return Over(hpu, metrics=SimpleNamespace(metric_localcontext=planted))

    return plant


def rotary_confused(kernels):
    right = kernels.rotary
    return Over(kernels, rotary={"BLOCKWISE": right["PAIRWISE"], "PAIRWISE": right["BLOCKWISE"]})


def keys_for_values(self, slots, keys, values):
    self.keys.index_copy_(0, slots, values)
    self.values.index_copy_(0, slots, keys)


COPY = BlockSwaps.copy
EVENT = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
FAULTS = {
    "64-bit integers": (recorder, "_NARROW", {torch.float64: torch.float32}),
    "float64": (recorder, "_NARROW", {torch.int64: torch.int32}),
    "FusedSDPA": {"kernels": lambda found: Over(found, attention=lambda *args: emulated_fused_sdpa(*args) * 1.1)},
    "HPU graph": {"hpu": stale_replays},
    "copies to the host": {"hpu": lambda hpu: Over(hpu, Event=lambda: EVENT)},
    "memory": {"hpu": lambda hpu: Over(hpu, mem_get_info=lambda: hpu.mem_get_info()[::-1])},
    "names": {"hpu": lambda hpu: Over(hpu, max_memory_allocated=None)},
    "mark_step": {"core": lambda core: Over(core, mark_step=lambda: None)},
    "PT_COMPILE_ONLY_MODE": {"internal": unknown_flag},
    "compilations counted": {"hpu": metric_of("graph_compilation", [("TotalNumber", 0)])},
    "fallbacks counted": {"hpu": metric_of("cpu_fallback", [("TotalNumber", 0), ("FallbackOps", {})])},
    "operations": (emulated_operations, "KERNELS", emulated_operations.KERNELS - {"topk"}),
    "KV cache": (FlatLayer, "write", keys_for_values),
    "block swaps": (BlockSwaps, "copy", lambda self, sources, targets: COPY(self, sources[:1], targets[:1])),
    "mixture_of_experts": {"kernels": lambda found: Over(found, experts=lambda *args: found.experts(*args) * 0.9)},
    "FusedRMSNorm": {
        "kernels": lambda found: Over(found, norm=lambda x, gamma, eps: found.norm(x, gamma + 1, eps)),
    },
    "apply_rotary_pos_emb": {"kernels": rotary_confused},
}
"""What is replaced on the bench, or by ``monkeypatch``, so that a check does not hold."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found_by_its_check_and_by_no_other(monkeypatch, name):
    fault = FAULTS[name]
    try:
        emulated_operations.operation_of.cache_clear()
        if isinstance(fault, tuple):
            monkeypatch.setattr(*fault)
        found = run(monkeypatch, "lazy", None if isinstance(fault, tuple) else bench_of("lazy", **fault))
    finally:
        emulated_operations.operation_of.cache_clear()
    assert list(found) == [name]


@pytest.mark.slow
def test_a_graph_for_each_layer_is_found(monkeypatch):
    """A number of its own in each layer, which its graph takes for a constant."""
    made, forward = graphs._Layer.__init__, graphs._Layer.forward

    def numbered(self, size, seed, device):
        made(self, size, seed, device)
        self.number = seed

    monkeypatch.setattr(graphs._Layer, "__init__", numbered)
    monkeypatch.setattr(graphs._Layer, "forward", lambda self, x, slots: forward(self, x, slots) + 0 * self.number)
    found = run(monkeypatch, "compile")
    assert list(found) == ["torch.compile"]
    assert found["torch.compile"].startswith("4 graphs")


@pytest.mark.parametrize("name", ["mixture_of_experts", "FusedRMSNorm", "apply_rotary_pos_emb", "fp8"])
def test_kernel_that_is_not_there_is_not_tested(name):
    bench = bench_of("eager", kernels=lambda found: SimpleNamespace(experts=None, norm=None, rotary=None))
    (check,) = [check for check in TABLE if check.name == name]
    assert check.function()(bench).holds is None


@pytest.mark.parametrize(("factor", "holds"), [(1, True), (2, False)])
def test_fp8_that_is_scaled_twice_is_found(monkeypatch, factor, holds):
    bench = Bench(GaudiConfig(device="emulated", mode="eager", fp8="dynamic"))
    right = linear.fp8_product
    monkeypatch.setattr(linear, "fp8_product", lambda *args, **options: right(*args, **options) * factor)
    (check,) = [check for check in TABLE if check.name == "fp8"]
    assert check.function()(bench).holds is holds


def test_check_that_raises_is_a_finding_with_its_place(monkeypatch):
    def broken(bench):
        raise RuntimeError("synStatus 26\n\n   Graph compile failed\n")

    monkeypatch.setattr("trencadis_gaudi.checks.numbers.integers", broken)
    monkeypatch.setattr("trencadis_gaudi.checks.bench.Bench", lambda config: None)
    lines = io.StringIO()
    (check,) = [check for check in TABLE if check.name == "64-bit integers"]
    child.run_checks([check], "eager", GaudiConfig(mode="eager"), lines)
    ended = json.loads(lines.getvalue().splitlines()[-1])
    assert ended["holds"] is False
    assert ended["text"].startswith("raised RuntimeError at test_facts.py:")
    assert ended["text"].endswith("synStatus 26 Graph compile failed")


def test_without_a_device_nothing_else_is_tested(monkeypatch):
    lines = io.StringIO()
    child.run_checks(checks_of("eager"), "eager", GaudiConfig(mode="eager"), lines)
    ended = [line for line in map(json.loads, lines.getvalue().splitlines()) if "ended" in line]
    assert [line["ended"] for line in ended if line["holds"] is False] == ["device"]
    assert "Gaudi software" in ended[0]["text"]
    assert {line["text"] for line in ended[1:]} == {"not tested: the device could not be opened"}


def test_cards_are_not_tested_without_a_device_nor_with_one():
    assert cards.sums(Bench(GaudiConfig(mode="eager"))).holds is None
    one = SimpleNamespace(habana=SimpleNamespace(hpu=SimpleNamespace(device_count=lambda: 1)))
    assert cards.sums(one) == Found(None, "one device: not tested")


@pytest.mark.parametrize(
    ("tokens", "is_emulated", "holds"),
    [(16, True, True), (15, True, False), (15, False, True), (9, False, True), (7, False, False)],
)
def test_texts_are_compared_token_by_token(tokens, is_emulated, holds):
    """On a Gaudi near ties round otherwise; the emulated device has no such excuse."""
    expected = [[1] * 16] * len(engine._REQUESTS)
    found = [[1] * tokens + [2] * (16 - tokens)] * len(engine._REQUESTS)
    bench = SimpleNamespace(
        served=engine._Served(found, 1, 0),
        reference=engine._Served(expected, 1, 0),
        habana=SimpleNamespace(emulated=object() if is_emulated else None),
    )
    assert engine.greedy(bench).holds is holds


def test_counts_of_an_engine_are_checked_if_there_are_any():
    bench = SimpleNamespace(served=None, counts=True)
    assert engine.compiles_nothing(bench).holds is engine.falls_back_nowhere(bench).holds is None
    bench.served = engine._Served([], 1, 3, {"aten.sort": 2})
    assert engine.compiles_nothing(bench) == Found(False, "3 programs after the warm-up")
    assert engine.falls_back_nowhere(bench) == Found(False, "aten.sort 2 times")
    bench.counts = False
    assert engine.compiles_nothing(bench).holds is None


NO_RESULT = {
    "alias", "as_strided", "detach", "empty", "empty_strided", "expand", "expand_as", "flatten", "is_nonzero", "item", "lift_fresh",
    "numpy_T", "permute", "reshape", "select", "slice", "split", "squeeze", "to", "transpose", "unbind", "unflatten", "unsqueeze",
    "view",
}  # fmt: skip
"""Operations of the backend that compute nothing: views, memory and reads."""


@pytest.mark.slow
def test_the_list_of_operations_is_what_an_engine_runs(model_path, monkeypatch):
    def names_of(run):
        seen, dispatch = set(), recorder.Recorder.dispatch

        def recorded(self, func, args, kwargs):
            seen.add(str(func.overloadpacket).removeprefix("aten."))
            return dispatch(self, func, args, kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(recorder.Recorder, "dispatch", recorded)
            run()
        return seen - NO_RESULT

    def serve():
        opened = gaudi_engines.open_engine(model_path("llama"), mode="eager")
        gaudi_engines.serve(opened, 2)
        opened.close()

    # The vendor's kernels have checks of their own.
    served = {name for name in names_of(serve) if not name.startswith("hpu.")}
    assert served <= names_of(lambda: operations.every(bench_of("eager")))
