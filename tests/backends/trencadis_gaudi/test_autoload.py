"""Since release 1.18 of the Gaudi software ``import torch`` imports it: a stand-in does so in the processes of a command.

The stand-in finds no device, so that a command that gets so far ends with an error in words.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.fixture
def software(tmp_path: Path) -> Path:
    """A folder that has the stand-in and its distribution's record."""
    for name, text in _PACKAGE.items():
        file = tmp_path / "habana_frameworks" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    record = tmp_path / "habana_torch_plugin-1.22.1.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: habana-torch-plugin\nVersion: 1.22.1\n")
    (record / "entry_points.txt").write_text("[torch.backends]\ndevice_backend = habana_frameworks:autoload\n")
    return tmp_path


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
