from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.habana import VERSIONS
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
