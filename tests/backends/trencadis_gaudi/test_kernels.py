from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from trencadis.clock import SystemClock
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.habana import VERSIONS, load_habana
from trencadis_gaudi.kernels import KERNELS, Kernels

API = json.loads((Path(__file__).parent / "habana_api.json").read_text())["modules"]
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


def test_emulated_device_has_all_of_them():
    kernels = load_habana(GaudiConfig(device="emulated", mode="lazy"), clock=SystemClock()).kernels
    assert all(getattr(kernels, name) is not None for name in USED)


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


@pytest.mark.slow
def test_table_is_read_without_torch():
    code = "import sys, trencadis_gaudi.kernels; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
