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


def test_emulated_device_is_named_as_such_and_nothing_is_run():
    def run():
        raise AssertionError

    assert "a CPU stands for a Gaudi" in said(device="emulated", smi=run)


def test_installation_that_is_right_names_release_mode_and_devices():
    found = findings(environ={"HABANA_VISIBLE_DEVICES": "0"})
    assert {one.severity for one in found} == {Severity.OK}
    text = said(environ={"HABANA_VISIBLE_DEVICES": "0"})
    assert "habana-torch-plugin 1.22.1, torch 2.7.1" in text
    assert "mode = compile needs PT_HPU_LAZY_MODE=0, which is not set and will be set" in text
    assert "device 1, HL-225, 1.22.1-97ec1a4, 768 MiB, 98304 MiB" in text
    assert "HABANA_VISIBLE_DEVICES=0" in text
    assert "kernels used where they serve: FusedSDPA, FusedRMSNorm, apply_rotary_pos_emb, mixture_of_experts." in text


def test_kernels_that_are_switched_off_are_named_with_their_key():
    assert "serve: FusedRMSNorm, apply_rotary_pos_emb, mixture_of_experts; FusedSDPA is off by fused_sdpa" in said(
        fused_sdpa=False
    )
    assert "FusedRMSNorm is off by fused_kernels" in said(fused_kernels=False)


def test_old_release_is_told_its_mode():
    assert "mode = lazy needs PT_HPU_LAZY_MODE=1" in said(version="1.19.0")


def test_environment_of_another_mode_is_a_warning_with_the_remedy():
    text = said(mode="compile", environ={"PT_HPU_LAZY_MODE": "1"})
    assert "warn: [backend.gaudi] mode = compile needs PT_HPU_LAZY_MODE=0, which is '1'" in text
    assert "Set PT_HPU_LAZY_MODE=0 where the server is started" in text


def test_missing_software_is_a_failure_and_ends_the_check():
    assert said(version=None).startswith("fail: habana-torch-plugin is not installed")


@pytest.mark.parametrize(
    ("smi", "told"),
    [
        (lambda: None, "warn: there is no hl-smi"),
        (lambda: "\n", "fail: hl-smi finds no device"),
    ],
)
def test_devices_that_cannot_be_listed_are_said(smi, told):
    assert told in said(smi=smi)


def test_tool_that_fails_is_a_failure_with_its_words():
    def fail():
        raise subprocess.CalledProcessError(3, ["hl-smi"])

    assert "fail: hl-smi fails: Command '['hl-smi']' returned non-zero exit status 3" in said(smi=fail)


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"HABANA_VISIBLE_MODULES": "5,4"}, "ok: HABANA_VISIBLE_MODULES=5,4"),
        ({"HLS_MODULE_ID": "5"}, "ok: HLS_MODULE_ID=5"),
        ({"HABANA_VISIBLE_MODULES": "5, 4", "HLS_MODULE_ID": "4"}, "ok: HLS_MODULE_ID=4"),
        ({"HABANA_VISIBLE_MODULES": "5,4", "HLS_MODULE_ID": "0"}, "fail: HLS_MODULE_ID=0 is not one of"),
        ({"HABANA_VISIBLE_MODULES": "5,5"}, "fail: HABANA_VISIBLE_MODULES=5,5 is no list"),
        ({"HABANA_VISIBLE_MODULES": "all"}, "fail: HABANA_VISIBLE_MODULES=all is no list"),
        ({"HLS_MODULE_ID": "first"}, "fail: HLS_MODULE_ID=first is no module number"),
    ],
)
def test_modules_that_a_process_may_take_are_named_and_must_agree(environ, told):
    assert told in said(environ=environ)


def test_modules_are_not_spoken_of_where_no_variable_chooses_them():
    assert "MODULE" not in said()


def test_each_rank_is_told_its_module():
    text = said(tensor=2)
    assert "exchanges tensors over HCCL: rank 0 takes module 0, rank 1 takes module 1." in text
    text = said(tensor=2, environ={"HABANA_VISIBLE_MODULES": "5,3"})
    assert "rank 0 takes module 5, rank 1 takes module 3." in text
    assert "fail" not in text
    assert "2 ranks: each has an emulated device in a process of its own" in said(tensor=2, device="emulated")
    assert "rank" not in said()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tensor": 2, "data": 2}, "fail: [parallel] tensor and data ask for 4 ranks, and there are 2 devices"),
        ({"environ": {"HABANA_VISIBLE_MODULES": "5"}}, "fail: rank 1: HABANA_VISIBLE_MODULES=5 names 1 modules"),
        ({"environ": {"HLS_MODULE_ID": "5"}}, "fail: rank 1: HLS_MODULE_ID=5 gives every rank the same module"),
        (
            {"version": "1.19.0", "environ": {"PT_HPU_ENABLE_LAZY_COLLECTIVES": "false"}},
            "fail: PT_HPU_ENABLE_LAZY_COLLECTIVES=false: HPU graphs would hold nothing that ranks exchange",
        ),
    ],
)
def test_what_keeps_ranks_from_starting_is_a_failure(options, told):
    assert told in said(**{"tensor": 2, **options})


def test_lazy_collectives_are_of_no_account_in_other_modes():
    assert "COLLECTIVES" not in said(tensor=2, environ={"PT_HPU_ENABLE_LAZY_COLLECTIVES": "false"})
