from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch

from trencadis.clock import SimulatedClock, SystemClock
from trencadis_gaudi.attention.fused_sdpa import emulated_fused_sdpa
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.emulated import EmulatedDevice, EmulatedDeviceError, EmulatedMemoryError
from trencadis_gaudi.emulated.compiler import counting_backend
from trencadis_gaudi.emulated.hpex import emulated_hpex
from trencadis_gaudi.emulated.surface import emulated_habana
from trencadis_gaudi.habana import load_habana


def device_of(total_bytes=1000, **options):
    return EmulatedDevice(total_bytes=total_bytes, lazy=True, clock=SimulatedClock(), **options)


def test_recipe_is_compiled_once_and_charged_once():
    device = device_of(compile_s=2.5)
    assert device.need_recipe(b"a", what="A")
    assert not device.need_recipe(b"a", what="A")
    assert device.need_recipe(b"b", what="B")
    assert (device.num_compilations, device.num_recipe_hits, device.compile_s) == (2, 1, 5.0)


def test_frozen_device_runs_what_it_has_and_compiles_nothing():
    device = device_of()
    device.need_recipe(b"a", what="A")
    device.frozen = True
    assert not device.need_recipe(b"a", what="A")
    with pytest.raises(EmulatedDeviceError, match="B would be compiled after the warm-up"):
        device.need_recipe(b"b", what="B")
    assert device.num_compilations == 1


def test_books_hold_one_amount_for_each_name():
    device = device_of()
    device.book("weights", 600)
    device.book("weights", 300)
    device.book("cache", 500)
    assert (device.used_bytes, device.booked("weights"), device.peak_bytes) == (800, 300, 800)
    device.book("cache", 0)
    assert (device.used_bytes, device.booked("cache"), device.peak_bytes) == (300, 0, 800)


def test_what_does_not_fit_is_refused_and_leaves_the_books_as_they_were():
    device = device_of()
    device.book("weights", 600)
    with pytest.raises(EmulatedMemoryError, match="1000: graphs needs 500 bytes, and 400 are free"):
        device.book("graphs", 500)
    with pytest.raises(EmulatedMemoryError):
        device.book("weights", 1001)
    assert device.used_bytes == 600


def test_peak_counts_moments_and_starts_again_on_request():
    device = device_of()
    device.book("weights", 100)
    device.touch(250)
    assert (device.peak_bytes, device.used_bytes) == (350, 100)
    device.reset_peak()
    assert device.peak_bytes == 100


def test_stats_have_the_vendors_names():
    device = device_of()
    device.book("weights", 100)
    device.book("cache", 300)
    device.book("weights", 0)
    stats = device.stats()
    assert (stats["Limit"], stats["InUse"], stats["MaxInUse"]) == (1000, 300, 400)
    assert (stats["NumAllocs"], stats["NumFrees"], stats["ActiveAllocs"], stats["MaxAllocSize"]) == (2, 1, 1, 300)
    device, modules, _ = make()
    device.book("weights", 30)
    assert modules.hpu.mem_get_info() == (70, 100)
    assert (modules.hpu.memory_allocated(), modules.hpu.max_memory_allocated()) == (30, 30)
    assert modules.hpu.memory_stats()["InUse"] == 30


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


def test_flag_is_set_for_a_while_and_one_that_the_bridge_does_not_know_is_refused():
    device, modules, _ = make()
    config = modules.internal.bridge_config
    with config.env_setting("PT_COMPILE_ONLY_MODE", True):
        assert config.get_pt_compile_only_mode()
        assert device.compile_only
    assert not config.get_pt_compile_only_mode()
    assert not device.compile_only

    with pytest.raises(RuntimeError, match="within"), config.env_setting("PT_COMPILE_ONLY_MODE", True):
        raise RuntimeError("within")
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


HPEX = emulated_hpex()
BLOCKWISE, PAIRWISE = HPEX.kernels.RotaryPosEmbeddingMode


@pytest.mark.parametrize(("shape", "eps"), [((32, 1, 40), 1e-6), ((8, 2, 2, 4), 3e-5), ((1, 2, 4, 17, 20), 3e-5)])
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)])
def test_norm_is_that_of_the_bridges_own_test(shape, eps, dtypes):
    """Shapes, epsilons, formula and tolerances of gaudi-pytorch-bridge 1.19.0, test_hpu_rms_norm.py; types of RMSNormMeta."""
    x, gamma = torch.rand(shape).to(dtypes[0]), torch.rand(shape[-1]).to(dtypes[1])
    expected = x.float() * gamma.float() / torch.sqrt(torch.mean(torch.square(x.float()), -1, keepdim=True) + eps)
    found = HPEX.normalization.FusedRMSNorm.apply(x, gamma, eps)
    assert found.dtype == (dtypes[0] if dtypes[0] == dtypes[1] else torch.float32)
    tolerance = 1e-3 if dtypes == (torch.float32,) * 2 else 0.015
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


def test_rotary_embeddings_rotate_pairs_by_their_angle():
    """From the definition: the pair as a complex number, times one of length one."""
    x, angles = torch.randn(5, 1, 2, 8, dtype=torch.float64), torch.randn(5, 1, 1, 4, dtype=torch.float64)
    turn = torch.polar(torch.ones_like(angles), angles)
    for mode, pairs, tables in (
        (BLOCKWISE, torch.stack(x.chunk(2, -1), -1), torch.cat([angles, angles], -1)),
        (PAIRWISE, x.unflatten(-1, (4, 2)), angles.repeat_interleave(2, -1)),
    ):
        found = HPEX.kernels.apply_rotary_pos_emb(x, tables.cos(), tables.sin(), None, 0, mode)
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        expected = torch.cat(turned.unbind(-1), -1) if mode == BLOCKWISE else turned.flatten(-2)
        torch.testing.assert_close(found, expected)


def test_float32_among_the_arguments_makes_a_rotary_embedding_float32():
    x, table = torch.randn(2, 1, 1, 4).bfloat16(), torch.randn(2, 1, 1, 4)
    for kinds, expected in (((table, table), torch.float32), ((table.bfloat16(),) * 2, torch.bfloat16)):
        assert HPEX.kernels.apply_rotary_pos_emb(x, *kinds, None, 0, PAIRWISE).dtype == expected


def test_kernels_refuse_what_the_backend_does_not_need():
    x, table = torch.randn(2, 1, 1, 4), torch.randn(2, 1, 1, 4)
    with pytest.raises(EmulatedDeviceError, match="neither position_ids nor an offset"):
        HPEX.kernels.apply_rotary_pos_emb(x, table, table, None, 1, BLOCKWISE)
    with pytest.raises(EmulatedDeviceError, match=r"tables \(2, 1, 1, 2\) for input \(2, 1, 1, 4\)"):
        HPEX.kernels.apply_rotary_pos_emb(x, table[..., :2], table[..., :2], None, 0, BLOCKWISE)
    with pytest.raises(EmulatedDeviceError, match="no fast_math"):
        HPEX.normalization.FusedRMSNorm.apply(x, table[0, 0, 0], 1e-6, True, 0, True)


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_kernel_is_one_recipe_of_the_device(mode):
    habana = load_habana(GaudiConfig(device="emulated", mode=mode), clock=SystemClock())
    x, gamma = (torch.ones(shape).to(habana.device) for shape in ((1, 3, 8), (8,)))
    habana.mark_step()
    before = habana.emulated.num_compilations
    found = HPEX.normalization.FusedRMSNorm.apply(x, gamma, 1e-6)
    habana.mark_step()
    assert found.device.type == "hpu"
    assert habana.emulated.num_compilations - before == 1
