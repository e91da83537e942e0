"""Since release 1.18 of the Gaudi software ``import torch`` imports it: a stand-in does so in the processes of a command.

The stand-in finds no device, so that a command that gets so far ends with an error in words.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from trencadis_gaudi.checks.processes import run_group
from trencadis_gaudi.config import GaudiConfig

_PACKAGE = {
    "__init__.py": "def autoload():\n    import habana_frameworks.torch\n",
    "torch/__init__.py": """
import os
with open(os.environ["SEEN"], "a") as file:
    file.write(f"{os.environ.get('PT_HPU_LAZY_MODE')} {os.environ.get('PT_HPU_WEIGHT_SHARING')}\\n")
from habana_frameworks.torch import utils
""",
    "torch/core.py": "def mark_step(device_str='', sync=False): pass\n",
    "torch/hpu.py": """
from types import SimpleNamespace
Event = max_memory_allocated = mem_get_info = memory_allocated = reset_peak_memory_stats = synchronize = print
wrap_in_hpu_graph = print
metrics = SimpleNamespace(metric_localcontext=print)
def is_available(): return False
""",
    "torch/internal/__init__.py": "",
    "torch/internal/bridge_config.py": "env_setting = print\n",
    "torch/utils/__init__.py": "from habana_frameworks.torch.utils import internal\n",
    "torch/utils/internal.py": """
import os
_LAZY = os.environ.get("PT_HPU_LAZY_MODE", "0") != "0"
def is_lazy(): return _LAZY
""",
}


def install(root: Path, package: dict[str, str], *, version: str = "1.22.1", autoloads: bool = True) -> Path:
    """Write a stand-in and its distribution's record; returns where."""
    for name, text in package.items():
        file = root / "habana_frameworks" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    record = root / f"habana_torch_plugin-{version}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: habana-torch-plugin\nVersion: {version}\n")
    if autoloads:
        (record / "entry_points.txt").write_text("[torch.backends]\ndevice_backend = habana_frameworks:autoload\n")
    return root


@pytest.fixture
def software(tmp_path: Path) -> Path:
    return install(tmp_path, _PACKAGE)


def generate(software: Path, *words: str, before: str = "", **environ: str) -> tuple[str, list[str]]:
    """Run ``trencadis generate``; returns its errors, and the environment that each import of the stand-in saw."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PT_HPU_")} | environ
    environ["PYTHONPATH"] = os.pathsep.join([str(software), *sys.path])
    environ["SEEN"] = str(software / "seen")
    start = f"{before}\nimport sys\nfrom trencadis.__main__ import main\nsys.exit(main())"
    flags = ["generate", "--backend.name", "gaudi", *words, "Hello"]
    found = subprocess.run(
        [sys.executable, "-c", start, *flags], env=environ, capture_output=True, text=True, check=False
    )
    assert found.returncode != 0
    seen = software / "seen"
    return found.stderr, seen.read_text().splitlines() if seen.exists() else []


@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    ("words", "environ", "mode"),
    [
        ((), {}, "0"),
        (("--backend.gaudi.mode", "lazy"), {}, "1"),
        (("--backend.gaudi.mode", "eager"), {}, "0"),
        ((), {"PT_HPU_LAZY_MODE": "1"}, "1"),
    ],
)
def test_every_mode_is_in_the_environment_before_torch_is_imported(software, words, environ, mode):
    told, seen = generate(software, *words, **environ)
    assert "The Gaudi software is installed, but finds no Gaudi." in told
    assert set(seen) == {f"{mode} 0"}


@pytest.mark.nightly  # in one process: test_environment.py
def test_mode_in_which_torch_imported_it_is_used_where_none_is_configured(software):
    told, seen = generate(software, before="import torch", PT_HPU_LAZY_MODE="0")
    assert "finds no Gaudi" in told
    assert {line.split()[0] for line in seen} == {"0"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (None, {"release"}),
        ({}, set()),
        ({"version": "1.19.0", "default": "1"}, set()),
        ({"version": "1.18.0", "default": "1"}, {"release"}),
        ({"autoloads": False}, {"autoload"}),
        ({"default": "1"}, {"default mode"}),
    ],
)
def test_a_fact_of_the_software_that_does_not_hold_is_found_alone(tmp_path, monkeypatch, options, wrong):
    options = None if options is None else dict(options)
    if options is not None:
        default = options.pop("default", "0")
        lazy = f"import os\ndef is_lazy(): return os.environ.get('PT_HPU_LAZY_MODE', '{default}') != '0'\n"
        package = {"__init__.py": _PACKAGE["__init__.py"], "torch/__init__.py": "", "torch/utils/__init__.py": ""}
        install(tmp_path, {**package, "torch/utils/internal.py": lazy}, **options)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")  # unset in that process
    found = []
    run_group("software", attrs.asdict(GaudiConfig()), timeout_s=120, note=found.append)
    assert {one.check.name for one in found if one.is_wrong} == wrong
    assert len(found) == 3
