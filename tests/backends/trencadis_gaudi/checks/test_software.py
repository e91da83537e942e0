"""Facts of installed software, with a stand-in for it; each in a process that imports torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import attrs
import pytest

from trencadis_gaudi.checks.processes import run_group
from trencadis_gaudi.config import GaudiConfig

pytestmark = pytest.mark.slow

PACKAGE = {
    "__init__.py": "def autoload():\n    import habana_frameworks.torch\n",
    "torch/__init__.py": "",
    "torch/utils/__init__.py": "",
    "torch/utils/internal.py": "import os\ndef is_lazy(): return os.environ.get('PT_HPU_LAZY_MODE', {default!r}) != '0'\n",
}


def install(root: Path, *, version="1.22.1", autoloads=True, default="0"):
    for name, text in PACKAGE.items():
        file = root / "habana_frameworks" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("{default!r}", repr(default)))
    record = root / f"habana_torch_plugin-{version}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: habana-torch-plugin\nVersion: {version}\n")
    if autoloads:
        (record / "entry_points.txt").write_text("[torch.backends]\ndevice_backend = habana_frameworks:autoload\n")


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
    if options is not None:
        install(tmp_path, **options)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")  # unset in that process
    found = []
    run_group("software", attrs.asdict(GaudiConfig()), timeout_s=120, note=found.append)
    assert {one.check.name for one in found if one.is_wrong} == wrong
    assert len(found) == 3
