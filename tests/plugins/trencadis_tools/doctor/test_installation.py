from __future__ import annotations

import importlib
import importlib.metadata
import types

import pytest

from trencadis_tools.doctor import installation
from trencadis_tools.doctor.installation import check_installation


@pytest.fixture(autouse=True)
def _nothing_was_started(monkeypatch):
    monkeypatch.setattr(installation, "last_start", lambda: None)


def requires(monkeypatch, *texts):
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: list(texts))


def test_this_environment_is_sound(found, told):
    check_installation(found)
    assert {severity for severity, _ in told()} <= {"ok", "warn"}
    assert any("required packages in tested versions" in message for _, message in told())


@pytest.mark.parametrize(
    ("text", "severity", "words"),
    [
        ("nothing-of-this-name>=2", "fail", "nothing-of-this-name is not installed; needed is >=2"),
        ("attrs>=9999", "fail", "needed is >=9999"),
        ("attrs>=1,<2", "warn", "newer"),
        ("attrs>=1", "ok", "2 required"),
        ("no-such-thing>=1; platform_system == 'Plan 9'", "ok", "1 required"),
        ('nothing-of-this-name>=2; extra == "gguf"', "ok", "pip install 'trencadis[gguf]'"),
    ],
)
@pytest.mark.representatives(6)
def test_requirements_are_held_against_what_is_installed(found, told, monkeypatch, text, severity, words):
    requires(monkeypatch, "numpy>=1", text)
    check_installation(found)
    assert any(kind == severity and words in message for kind, message in told()), told()
    assert ("fail" in [kind for kind, _ in told()]) == (severity == "fail")
    assert all("pip install" in item.remedy for item in found if item.severity.value == "fail")


def test_package_without_a_distribution_is_wrong(found, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    check_installation(found)
    (item,) = found
    assert "no distribution of that name is installed" in item.message
    assert "pip install" in item.remedy


def torch(monkeypatch, *, devices=0, cuda=None):
    fake = types.SimpleNamespace(
        __version__="9.9",
        version=types.SimpleNamespace(cuda=cuda),
        cuda=types.SimpleNamespace(
            is_available=lambda: devices > 0,
            device_count=lambda: devices,
            get_device_name=lambda index: f"H{index}",
        ),
    )
    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name: fake if name == "torch" else real(name))


@pytest.mark.parametrize(
    ("build", "seen", "severity", "words"),
    [
        ({"devices": 2, "cuda": "12"}, None, "ok", "CUDA devices: H0, H1"),
        ({"cuda": "12"}, None, "warn", "built for CUDA 12, but no CUDA device"),
        ({}, "/usr/bin/nvidia-smi", "warn", "a build for the CPU, but this machine seems to have"),
        ({}, None, "ok", "torch 9.9, CPU only"),
    ],
)
def test_build_of_torch_is_held_against_the_machine(found, told, monkeypatch, build, seen, severity, words):
    import shutil

    monkeypatch.setattr(shutil, "which", lambda name: seen)
    torch(monkeypatch, **build)
    check_installation(found)
    kind, message = told()[-1]
    assert kind == severity
    assert words in message


def test_torch_that_cannot_be_imported_is_wrong(found, told, monkeypatch):
    def broken(name):
        raise OSError("libtorch.so: cannot open")

    monkeypatch.setattr(importlib, "import_module", broken)
    check_installation(found)
    assert told()[-1] == ("fail", "torch cannot be imported: OSError: libtorch.so: cannot open")
