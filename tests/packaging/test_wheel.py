from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

APPLICATIONS = ("trencadis_server", "trencadis_tools")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip install -e '.[dev]'")
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.slow
def test_wheel_holds_all_packages_typed(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for package in (
        "trencadis",
        "trencadis_testing",
        "trencadis_plugins",
        *APPLICATIONS,
        "trencadis_kv",
        "trencadis_torch",
        "trencadis_gaudi",
    ):
        assert f"{package}/__init__.py" in names
        assert f"{package}/py.typed" in names
    tops = {name.split("/")[0] for name in names}
    assert all(top.startswith("trencadis") for top in tops), tops


def test_wheel_carries_all_demo_models_within_15_mb(wheel: zipfile.ZipFile) -> None:
    sizes = {entry.filename: entry.file_size for entry in wheel.infolist() if "/demo/" in entry.filename}
    for model in ("target", "draft", "parallel"):
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            assert sizes[f"trencadis/demo/{model}/{name}"] > 0
    assert sum(sizes.values()) <= 15_000_000


def test_wheel_registers_every_built_in_through_entry_points(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    text = wheel.read(name).decode()
    for plugin in ("bucketing", "eviction", "executor", "observer", "sampling", "scheduling"):
        assert f"{plugin} = trencadis_plugins.{plugin}" in text
    for plugin, folder in {"kv_connector": "connectors", "kv_codec": "codecs", "kv_policy": "policies"}.items():
        assert f"{plugin} = trencadis_kv.{folder}" in text
    for plugin in ("kv", "server", "tools"):
        assert f"{plugin} = trencadis_{plugin}" in text
    assert "torch = trencadis_torch" in text
    assert "gaudi = trencadis_gaudi" in text
    assert "trencadis = trencadis.cli:main" in text


def test_wheel_carries_the_templates_of_new_plugins(wheel: zipfile.ZipFile) -> None:
    from trencadis.hookspecs import NOUNS

    names = set(wheel.namelist())
    for template in ("pyproject.toml", "README.md", "init.py", "config.py", *(f"{noun}.py" for noun in NOUNS)):
        assert f"trencadis_tools/new_plugin/templates/{template}.tmpl" in names


def test_wheel_carries_the_kernels_with_their_headers(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    sources = [path for suffix in ("cpp", "h") for path in (ROOT / "backends").rglob(f"*.{suffix}")]
    assert len(sources) > 2
    assert {str(path.relative_to(ROOT / "backends")) for path in sources} <= names
