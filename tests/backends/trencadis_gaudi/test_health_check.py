from __future__ import annotations

import subprocess
from importlib import metadata
from types import SimpleNamespace

import pytest

from trencadis.interfaces import Severity
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.health_check import check_gaudi

DEVICES = "0, HL-225, 1.22.1-97ec1a4, 768 MiB, 98304 MiB\n1, HL-225, 1.22.1-97ec1a4, 768 MiB, 98304 MiB\n"


def findings(name="gaudi", *, environ=(), version="1.22.1", smi=lambda: DEVICES, tensor=1, data=1, **options):
    def version_of(distribution):
        if distribution == "habana-torch-plugin" and version is None:
            raise metadata.PackageNotFoundError(distribution)
        return version if distribution == "habana-torch-plugin" else "2.7.1"

    config = SimpleNamespace(
        backend=SimpleNamespace(name=name, components={"gaudi": GaudiConfig(**options)}),
        parallel=SimpleNamespace(tensor=tensor, data=data),
    )
    return list(check_gaudi(config, environ=dict(environ), version_of=version_of, smi=smi))


def said(*args, **options):
    return "\n".join(f"{one.severity.value}: {one.message}. {one.remedy}" for one in findings(*args, **options))


def test_nothing_is_looked_at_for_another_backend():
    assert findings("torch") == []


def test_installation_that_is_right_names_release_mode_and_devices():
    found = findings(environ={"HABANA_VISIBLE_DEVICES": "0"})
    assert {one.severity for one in found} == {Severity.OK}
    text = said(environ={"HABANA_VISIBLE_DEVICES": "0"})
    assert "habana-torch-plugin 1.22.1, torch 2.7.1" in text
    assert "mode = compile needs PT_HPU_LAZY_MODE=0, which is not set and will be set" in text
    assert "device 1, HL-225, 1.22.1-97ec1a4, 768 MiB, 98304 MiB" in text
    assert "HABANA_VISIBLE_DEVICES=0" in text
    assert "kernels used where they serve: FusedSDPA, FusedRMSNorm, apply_rotary_pos_emb, mixture_of_experts." in text


def test_tool_that_fails_is_a_failure_with_its_words():
    def fail():
        raise subprocess.CalledProcessError(3, ["hl-smi"])

    assert "fail: hl-smi fails: Command '['hl-smi']' returned non-zero exit status 3" in said(smi=fail)


def never():
    raise AssertionError


LAZY_COLLECTIVES = {"PT_HPU_ENABLE_LAZY_COLLECTIVES": "false"}
SAID = [
    ({"device": "emulated", "smi": never}, "a CPU stands for a Gaudi"),
    ({"version": "1.19.0"}, "mode = lazy needs PT_HPU_LAZY_MODE=1"),
    ({"version": None}, "fail: habana-torch-plugin is not installed"),
    ({"smi": lambda: None}, "warn: there is no hl-smi"),
    ({"smi": lambda: "\n"}, "fail: hl-smi finds no device"),
    ({"fused_sdpa": False}, "FusedRMSNorm, apply_rotary_pos_emb, mixture_of_experts; FusedSDPA is off by fused_sdpa"),
    ({"fused_kernels": False}, "FusedRMSNorm is off by fused_kernels"),
    (
        {"mode": "compile", "environ": {"PT_HPU_LAZY_MODE": "1"}},
        "warn: [backend.gaudi] mode = compile needs PT_HPU_LAZY_MODE=0, which is '1'",
    ),
    (
        {"mode": "compile", "environ": {"PT_HPU_LAZY_MODE": "1"}},
        "Set PT_HPU_LAZY_MODE=0 where the server is started",
    ),
    ({"environ": {"HABANA_VISIBLE_MODULES": "5,4"}}, "ok: HABANA_VISIBLE_MODULES=5,4"),
    ({"environ": {"HLS_MODULE_ID": "5"}}, "ok: HLS_MODULE_ID=5"),
    ({"environ": {"HABANA_VISIBLE_MODULES": "5, 4", "HLS_MODULE_ID": "4"}}, "ok: HLS_MODULE_ID=4"),
    (
        {"environ": {"HABANA_VISIBLE_MODULES": "5,4", "HLS_MODULE_ID": "0"}},
        "fail: HLS_MODULE_ID=0 is not one of",
    ),
    ({"environ": {"HABANA_VISIBLE_MODULES": "5,5"}}, "fail: HABANA_VISIBLE_MODULES=5,5 is no list"),
    ({"environ": {"HABANA_VISIBLE_MODULES": "all"}}, "fail: HABANA_VISIBLE_MODULES=all is no list"),
    ({"environ": {"HLS_MODULE_ID": "first"}}, "fail: HLS_MODULE_ID=first is no module number"),
    ({"tensor": 2, "data": 2}, "fail: [parallel] tensor and data ask for 4 ranks, and there are 2 devices"),
    (
        {"tensor": 2, "environ": {"HABANA_VISIBLE_MODULES": "5"}},
        "fail: rank 1: HABANA_VISIBLE_MODULES=5 names 1 modules",
    ),
    (
        {"tensor": 2, "environ": {"HLS_MODULE_ID": "5"}},
        "fail: rank 1: HLS_MODULE_ID=5 gives every rank the same module",
    ),
    (
        {"tensor": 2, "version": "1.19.0", "environ": LAZY_COLLECTIVES},
        "fail: PT_HPU_ENABLE_LAZY_COLLECTIVES=false: HPU graphs would hold nothing that ranks exchange",
    ),
    ({"tensor": 2}, "exchanges tensors over HCCL: rank 0 takes module 0, rank 1 takes module 1."),
    (
        {"tensor": 2, "environ": {"HABANA_VISIBLE_MODULES": "5,3"}},
        "rank 0 takes module 5, rank 1 takes module 3.",
    ),
    ({"tensor": 2, "device": "emulated"}, "2 ranks: each has an emulated device in a process of its own"),
]


@pytest.mark.representatives(len(SAID))
@pytest.mark.parametrize(("options", "told"), SAID, ids=[told for _, told in SAID])
def test_what_is_found_is_said(options, told):
    text = said(**options)
    assert told in text
    assert ("fail: " in text) == told.startswith("fail: ")


def test_nothing_is_said_of_what_does_not_matter():
    assert "MODULE" not in said()
    assert "rank" not in said()
    assert "COLLECTIVES" not in said(tensor=2, environ=LAZY_COLLECTIVES)
    assert len(findings(version=None)) == 1
