from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from trencadis.clock import SimulatedClock
from trencadis_gaudi.attention.fused_sdpa import emulated_fused_sdpa
from trencadis_gaudi.emulated import EmulatedDevice, EmulatedDeviceError
from trencadis_gaudi.emulated.compiler import counting_backend
from trencadis_gaudi.emulated.surface import emulated_habana

API = json.loads((Path(__file__).parents[1] / "habana_api.json").read_text())["modules"]
ROOT = "habana_frameworks.torch"


def make(*, lazy=True):
    device = EmulatedDevice(total_bytes=100, lazy=lazy, clock=SimulatedClock())
    modules, recorder = emulated_habana(device)
    return device, modules, recorder


def names(text):
    """Parameter names and whether each has a default, of a signature as the vendor writes it."""
    found = []
    for part in filter(None, text[1:-1].split(", ")):
        name, _, default = part.partition("=")
        found.append((name, bool(default)))
    return [pair for pair in found if pair[0] not in {"self", "ctx"}]


def own(call):
    parameters = [one for one in inspect.signature(call).parameters.values() if one.kind is not one.VAR_KEYWORD]
    return [(one.name, one.default is not one.empty) for one in parameters]


_, LAZY, _ = make()
FUNCTIONS = {
    f"{ROOT}.core.step_closure": (LAZY.core, ["mark_step", "add_step_closure"]),
    f"{ROOT}.core.quantization": (LAZY.core, ["hpu_set_inference_env"]),
    f"{ROOT}.hpu": (LAZY.hpu, ["current_device", "device_count", "get_device_name", "is_available", "synchronize"]),
    f"{ROOT}.hpu.memory": (
        LAZY.hpu,
        ["max_memory_allocated", "mem_get_info", "memory_allocated", "memory_stats", "reset_peak_memory_stats"],
    ),
    f"{ROOT}.hpu.graphs": (LAZY.hpu, ["wrap_in_hpu_graph"]),
    f"{ROOT}.hpu.streams": (LAZY.hpu, ["current_stream", "default_stream", "stream"]),
    f"{ROOT}.hpu.metrics.metrics": (LAZY.hpu.metrics, ["metric_localcontext"]),
}


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, (_, listed) in FUNCTIONS.items() for name in listed]
)
def test_functions_have_the_vendors_signatures(module, name):
    assert own(getattr(FUNCTIONS[module][0], name)) == names(API[module]["functions"][name])


@pytest.mark.parametrize(
    ("module", "name", "methods"),
    [
        (f"{ROOT}.hpu.events", "Event", ["elapsed_time", "query", "record", "synchronize", "wait"]),
        (f"{ROOT}.hpu.streams", "Stream", ["query", "record_event", "synchronize", "wait_event", "wait_stream"]),
    ],
)
def test_classes_have_the_vendors_methods(module, name, methods):
    made = getattr(LAZY.hpu, name)()
    for method in methods:
        assert own(getattr(made, method)) == names(API[module]["classes"][name][method])


def test_kernel_and_compiler_have_the_vendors_signatures():
    kernel = API[f"{ROOT}.hpex.kernels.FusedSDPA"]["classes"]["FusedSDPA"]["forward"]
    assert own(emulated_fused_sdpa) == names(kernel)
    norm = API[f"{ROOT}.hpex.normalization.FusedRMSNorm"]["classes"]["FusedRMSNorm"]["forward"]
    assert own(LAZY.hpex.normalization.FusedRMSNorm.forward)[1:] == names(norm)  # without ctx
    helper = API[f"{ROOT}.hpex.kernels.RotaryPosEmbeddingHelper"]
    rotary = inspect.signature(LAZY.hpex.kernels.apply_rotary_pos_emb)
    assert [str(one).partition(":")[0] for one in rotary.parameters.values()] == ["p", "*args"]
    assert set(helper["functions"]) | set(helper["classes"]) <= set(vars(LAZY.hpex.kernels))
    backend = API[f"{ROOT}.dynamo.compile_backend.backends"]["functions"]["hpu_backend"]
    assert own(counting_backend(make()[0], make()[2])) == [
        pair for pair in names(backend) if not pair[0].startswith("*")
    ]


def test_nothing_public_is_offered_that_the_vendor_does_not_have():
    official = {name for module in API.values() for name in (*module["functions"], *module["classes"])}
    for part in (LAZY.core, LAZY.hpu):
        offered = {name for name in dir(part) if not name.startswith("_")}
        assert offered - official <= {"metrics"}  # a module


def test_graphs_are_there_in_lazy_mode_only():
    assert hasattr(LAZY.hpu, "wrap_in_hpu_graph")
    _, eager, _ = make(lazy=False)
    assert not hasattr(eager.hpu, "wrap_in_hpu_graph")
    assert (LAZY.utils.internal.is_lazy(), eager.utils.internal.is_lazy()) == (True, False)


def test_mark_step_outside_lazy_mode_does_nothing_and_says_so_once():
    device, modules, _ = make(lazy=False)
    with pytest.warns(UserWarning, match="outside lazy mode"):
        modules.core.mark_step()
    modules.core.mark_step()
    assert device.num_mark_steps == 0


def test_step_closures_run_at_the_next_mark():
    _, modules, _ = make()
    seen = []
    modules.core.add_step_closure(seen.append, (3,))
    assert not seen
    modules.core.mark_step()
    modules.core.mark_step()
    assert seen == [3]
    with pytest.raises(EmulatedDeviceError, match="needs lazy mode"):
        make(lazy=False)[1].core.add_step_closure(seen.append)


def test_memory_is_told_as_free_and_total():
    device, modules, _ = make()
    device.book("weights", 30)
    assert modules.hpu.mem_get_info() == (70, 100)
    assert (modules.hpu.memory_allocated(), modules.hpu.max_memory_allocated()) == (30, 30)
    assert modules.hpu.memory_stats()["InUse"] == 30


def test_flag_is_set_for_a_while_and_one_that_the_bridge_does_not_know_is_refused():
    device, modules, _ = make()
    config = modules.internal.bridge_config
    with config.env_setting("PT_COMPILE_ONLY_MODE", True):
        assert config.get_pt_compile_only_mode()
        assert device.compile_only
    assert not config.get_pt_compile_only_mode()
    assert not device.compile_only

    def fail_within():
        with config.env_setting("PT_COMPILE_ONLY_MODE", True):
            raise RuntimeError("within")

    with pytest.raises(RuntimeError, match="within"):
        fail_within()
    assert not config.get_pt_compile_only_mode()
    with pytest.raises(KeyError), config.env_setting("PT_NEW", True):
        pass


def test_metric_counts_the_compilations_of_its_block():
    device, modules, _ = make()
    device.need_recipe(b"before", what="A")
    with modules.hpu.metrics.metric_localcontext("graph_compilation") as metric:
        assert metric.stats()[0] == ("TotalNumber", 0)
        device.need_recipe(b"within", what="B")
        assert metric.stats()[0] == ("TotalNumber", 1)
    with pytest.raises(EmulatedDeviceError, match="graph_compilation"), modules.hpu.metrics.metric_localcontext("x"):
        pass


def test_metric_counts_the_fallbacks_of_its_block():
    device, modules, _ = make()
    device.fall_back("aten.i0")
    with modules.hpu.metrics.metric_localcontext("cpu_fallback") as metric:
        device.fall_back("aten.i0")
        assert metric.stats() == [("TotalNumber", 1), ("FallbackOps", {"aten.i0": 1})]


def test_events_and_streams_have_always_happened():
    event, stream = LAZY.hpu.Event(enable_timing=True), LAZY.hpu.current_stream()
    event.record()
    event.synchronize()
    assert event.query()
    assert stream.query()
    assert event.elapsed_time(stream.record_event()) == 0
    with LAZY.hpu.stream(stream):
        pass
