from __future__ import annotations

import ast
import inspect
import json
import logging
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import trencadis_gaudi
from trencadis.clock import SystemClock
from trencadis.errors import BackendError
from trencadis_gaudi.checks.device import ALSO_USED
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.fp8.operations import NAMES
from trencadis_gaudi.fp8.scales import GAUDI3
from trencadis_gaudi.habana import DISTRIBUTION, NEEDED, VERSIONS, load_habana
from trencadis_gaudi.kernels import KERNELS, Kernels

ROOT = Path(trencadis_gaudi.__file__).parent
API = json.loads((Path(__file__).parent / "habana_api.json").read_text())["modules"]
NOT_IN_THE_EXTRACT = {"internal.bridge_config.env_setting", "utils.internal.is_lazy"}
"""Defined in compiled modules of the bridge; known from its uses."""


def modules(*, available=True, lazy=True, without=()):
    """The vendor's modules, as far as the interface looks at them."""
    hpu = SimpleNamespace(
        metrics=SimpleNamespace(metric_localcontext=print),
        is_available=lambda: available,
        **dict.fromkeys(
            (
                "Event",
                "max_memory_allocated",
                "mem_get_info",
                "memory_allocated",
                "reset_peak_memory_stats",
                "synchronize",
            ),
            print,
        ),
    )
    if lazy:
        hpu.wrap_in_hpu_graph = print
    for name in without:
        delattr(hpu, name)
    top = "habana_frameworks.torch"
    found = {
        top: SimpleNamespace(),
        f"{top}.core": SimpleNamespace(mark_step=print),
        f"{top}.hpu": hpu,
        f"{top}.internal.bridge_config": SimpleNamespace(env_setting=print),
        f"{top}.utils.internal": SimpleNamespace(is_lazy=lambda: lazy),
    }

    def import_module(name):
        if name not in found:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found[name]

    return import_module


def load(import_module, *, version="1.22.1", **options):
    config = GaudiConfig(device="hpu", **{"mode": "lazy", **options})
    return load_habana(config, clock=SystemClock(), import_module=import_module, version_of=lambda _: version)


def error_of(*args, **options):
    with pytest.raises(BackendError) as caught:
        load(*args, **options)
    return f"{caught.value} {caught.value.hint}"


def test_missing_software_is_named_with_the_remedy():
    def nothing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name="habana_frameworks")

    told = error_of(nothing)
    assert "no module habana_frameworks" in told
    assert DISTRIBUTION in told
    assert "emulated" in told


def test_software_that_does_not_match_pytorch_says_both_versions():
    def broken(name):
        raise AssertionError("torch version mismatch: 2.6 != 2.13")

    told = error_of(broken)
    assert "torch version mismatch" in told
    assert "beside PyTorch" in told


@pytest.mark.parametrize("version", ["1.18.0", "1.25.0", "2.0", "dev"])
def test_unknown_version_is_refused_unless_asked_for(version):
    assert f"is {version}; this backend was written for 1.19 to 1.24" in error_of(modules(), version=version)
    assert load(modules(), version=version, any_version=True).is_lazy


def test_version_that_cannot_be_found_is_unknown():
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    config = GaudiConfig(device="hpu")
    with pytest.raises(BackendError, match="is unknown"):
        load_habana(config, clock=SystemClock(), import_module=modules(), version_of=missing)


def test_software_without_a_needed_function_is_refused_with_its_name():
    assert "has no hpu.mem_get_info in lazy mode" in error_of(modules(without=["mem_get_info"]))
    assert "has no hpu.wrap_in_hpu_graph in lazy mode" in error_of(modules(lazy=False))
    assert not load(modules(lazy=False), mode="compile").is_lazy


def test_range_of_fp8_is_that_of_the_device_and_asked_for_only_if_configured(monkeypatch):
    kinds = SimpleNamespace(synDeviceGaudi2=4, synDeviceGaudi3=5)
    experimental = SimpleNamespace(_get_device_type=lambda: 5, synDeviceType=kinds)
    others = modules()

    def import_module(name):
        return experimental if name == "habana_frameworks.torch.utils.experimental" else others(name)

    assert load(others).fp8 is None
    monkeypatch.setattr(torch.ops, "hpu", SimpleNamespace(), raising=False)
    told = error_of(others, kv_cache_dtype="fp8")
    assert "torch.ops.hpu.cast_to_fp8_v2" in told
    assert "kv_cache_dtype" in told
    monkeypatch.setattr(torch.ops, "hpu", SimpleNamespace(**dict.fromkeys(NAMES, print)), raising=False)
    assert load(import_module, fp8="dynamic").fp8 is GAUDI3


def test_machine_without_a_gaudi_is_told_of_the_emulated_one():
    told = error_of(modules(available=False))
    assert "finds no Gaudi" in told
    assert "emulated" in told


def test_real_device_has_no_books_and_marks_steps_in_lazy_mode_only():
    habana = load(modules())
    assert (habana.device.type, habana.compiler, habana.emulated) == ("hpu", "hpu_backend", None)
    habana.declare("weights", 10)
    habana.freeze()
    assert os.environ["PT_HPU_LAZY_MODE"] == "1"


def test_emulated_device_keeps_books_and_is_frozen_on_request():
    habana = load_habana(GaudiConfig(device="emulated", mode="lazy", emulated_memory_bytes=1000), clock=SystemClock())
    habana.declare("weights", 10)
    assert habana.free_bytes() == 990
    habana.freeze()
    assert habana.emulated.frozen
    assert habana.device.type == "hpu"


# ------------------------------------------------------------------- every call into the vendor's package, by its signature


def calls():
    """Path below habana_frameworks.torch, keyword names and number of arguments of each call in this room."""
    for file in ROOT.rglob("*.py"):
        if "emulated" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                path = _path(node.func)
                if path:
                    yield path, len(node.args), {keyword.arg for keyword in node.keywords}, file.name


def _path(node):
    parts = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    base = [node.id] if isinstance(node, ast.Name) else []
    parts = base + parts
    for index, part in enumerate(parts[:-1]):
        if (
            part in {"core", "hpu", "internal"}
            and index
            and parts[index - 1] in {"habana", "_habana", "self", "modules"}
        ):
            return ".".join(parts[index:])
    return ""


def official(path):
    """The vendor's signature of a function or class by its path."""
    name = path.rpartition(".")[2]
    for module in API.values():
        if name in module["functions"]:
            return _signature(module["functions"][name])
    return None


def _signature(text):
    parameters = []
    for part in filter(None, text[1:-1].split(", ")):
        name, _, default = part.partition("=")
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(inspect.Parameter(name, kind, default=default or inspect.Parameter.empty))
    return inspect.Signature(parameters)


def test_calls_into_the_vendors_package_fit_its_signatures():
    seen = set()
    for path, num_args, keywords, file in calls():
        seen.add(path)
        signature = official(path)
        if signature is not None:
            signature.bind(*[None] * num_args, **dict.fromkeys(keywords))
            continue
        assert path in NOT_IN_THE_EXTRACT | {"hpu.Event"}, f"{file} calls {path}"
    assert {"core.mark_step", "hpu.mem_get_info", "hpu.wrap_in_hpu_graph"} <= seen
    assert seen - {"hpu.wrap_in_hpu_graph", "hpu.is_available"} <= {*NEEDED, *ALSO_USED}


def test_nobody_but_the_seams_imports_the_vendors_package():
    found = {file.name for file in ROOT.rglob("*.py") if 'import_module("habana_frameworks' in file.read_text()}
    assert found == {"habana.py", "software.py", "cards.py"}


OLD_PYTORCH = """
import torch.utils.backend_registration as registration
del registration._setup_privateuseone_for_python_backend
import trencadis_gaudi.backend
from trencadis.clock import SystemClock
from trencadis.errors import BackendError
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.habana import load_habana
try:
    load_habana(GaudiConfig(device="emulated"), clock=SystemClock())
except BackendError as error:
    print(error)
"""


def test_a_pytorch_without_backends_in_python_serves_a_gaudi_and_not_the_emulated_one():
    """PyTorch of the Gaudi software is older than the emulated device needs: importing the backend must not need it."""
    found = subprocess.run([sys.executable, "-c", OLD_PYTORCH], capture_output=True, text=True, check=True)
    assert 'device = "emulated" needs a newer PyTorch than' in found.stdout


USED = ("attention", "norm", "rotary", "experts")


def nothing(name):
    raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_rows_name_what_the_bridge_has_in_a_release_that_is_served():
    for kernel in KERNELS:
        assert VERSIONS[0] <= kernel.since <= VERSIONS[1]
        if kernel.module.startswith("habana_frameworks"):
            found = [part for name, part in API.items() if name.startswith(f"{kernel.module}.")]
            offered = {name for part in found for name in (*part["functions"], *part["classes"])}
            assert {path.partition(".")[0] for path in kernel.paths} <= offered


@pytest.mark.parametrize("import_module", [nothing, lambda name: SimpleNamespace()])
def test_missing_kernels_are_one_warning_each_in_the_vendor_plugins_words(import_module, caplog):
    kernels = Kernels(GaudiConfig(), import_module)
    with caplog.at_level(logging.WARNING, "trencadis.gaudi"):
        assert [getattr(kernels, name) for name in USED for _ in range(2)] == [None] * 8
    assert caplog.messages == [
        "Could not import HPU FusedSDPA kernel. Prefills use plain operations.",
        "Could not import HPU FusedRMSNorm kernel. Norms use plain operations.",
        "Could not import HPU apply_rotary_pos_emb kernel. Rotary embeddings use plain operations.",
        "Could not import HPU mixture_of_experts kernel. Every expert runs on every token.",
    ]


def test_kernels_that_are_switched_off_are_not_looked_for():
    def never(name):
        raise AssertionError(name)

    kernels = Kernels(GaudiConfig(fused_sdpa=False, fused_kernels=False), never)
    assert [getattr(kernels, name) for name in USED] == [None] * 4


def test_rotary_kernel_is_called_as_the_vendor_plugin_does():
    calls = []
    module = SimpleNamespace(
        apply_rotary_pos_emb=lambda *args: calls.append(args),
        RotaryPosEmbeddingMode={"BLOCKWISE": "blocks", "PAIRWISE": "pairs"},
    )
    for kernel in Kernels(GaudiConfig(), lambda name: module).rotary.values():
        kernel("x", "cos", "sin")
    assert calls == [("x", "cos", "sin", None, 0, "blocks"), ("x", "cos", "sin", None, 0, "pairs")]
