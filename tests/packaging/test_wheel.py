from __future__ import annotations

import os
import platform
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from trencadis_torch.instruction_sets import SETS, chosen_set, find_compiler, library_name, narrowed, texts_of

ROOT = Path(__file__).parents[2]


ROOMS = ("core", "plugins", "backends")
SOURCES = sorted((ROOT / "backends").rglob("*.cpp"))


def built(target: Path, *, kernels: str, environment: Mapping[str, str] | None = None) -> tuple[zipfile.ZipFile, str]:
    """Build a wheel with kernels of some instruction sets; return it, and what the build said."""
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip install -e '.[dev]'")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    variables = {**(os.environ if environment is None else environment), "TRENCADIS_WHEEL_KERNELS": kernels}
    result = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path), result.stdout + result.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return built(tmp_path_factory.mktemp("wheel"), kernels="none")[0]


@pytest.mark.slow
def test_wheel_holds_all_packages_typed(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for package in (path.parent.name for room in ROOMS for path in (ROOT / room).glob("*/__init__.py")):
        assert f"{package}/__init__.py" in names
        assert f"{package}/py.typed" in names
    tops = {name.split("/")[0] for name in names}
    assert all(top.startswith("trencadis") for top in tops), tops


def test_wheel_carries_all_demo_models_within_18_mb(wheel: zipfile.ZipFile) -> None:
    sizes = {entry.filename: entry.file_size for entry in wheel.infolist() if "/demo/" in entry.filename}
    for model in ("target", "draft", "distilled", "parallel"):
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            assert sizes[f"trencadis/demo/{model}/{name}"] > 0
    for name in ("config.json", "model.safetensors"):
        assert sizes[f"trencadis/demo/head/{name}"] > 0
    assert sum(sizes.values()) <= 18_000_000


def test_wheel_registers_every_built_in_through_entry_points(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    text = wheel.read(name).decode()
    for plugin in ("bucketing", "eviction", "executor", "observer", "sampling", "scheduling"):
        assert f"{plugin} = trencadis_plugins.{plugin}" in text
    for plugin, folder in {"kv_connector": "connectors", "kv_codec": "codecs", "kv_policy": "policies"}.items():
        assert f"{plugin} = trencadis_kv.{folder}" in text
    for plugin in ("gallery", "kv", "server", "tools"):
        assert f"{plugin} = trencadis_{plugin}" in text
    assert "placement = trencadis_remote" in text
    assert "torch = trencadis_torch" in text
    assert "gaudi = trencadis_gaudi" in text
    assert "trencadis = trencadis.__main__:main" in text


def test_wheel_carries_the_templates_of_new_plugins(wheel: zipfile.ZipFile) -> None:
    from support.nouns import ALL_NOUNS

    names = set(wheel.namelist())
    shared = ("pyproject.toml", "README.md", "init.py", "init_stage.py", "config.py", "stage.py")
    for template in (*shared, *(f"{noun}.py" for noun in ALL_NOUNS)):
        assert f"trencadis_tools/new_plugin/templates/{template}.tmpl" in names


def test_wheel_carries_the_kernels_with_their_headers(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    sources = [path for suffix in ("cpp", "h") for path in (ROOT / "backends").rglob(f"*.{suffix}")]
    assert len(sources) > 2
    assert {str(path.relative_to(ROOT / "backends")) for path in sources} <= names


def test_wheel_that_is_built_without_a_compiler_has_no_kernels_and_says_so(tmp_path: Path) -> None:
    archive, said = built(tmp_path, kernels="", environment={"PATH": str(tmp_path), "HOME": str(tmp_path)})
    assert archive.filename is not None
    assert archive.filename.endswith("-py3-none-any.whl")
    assert "The wheel has no compiled kernels: there is no C++ compiler here." in said


ATTENDS = """
import sys; sys.path.insert(0, sys.argv[1])
from pathlib import Path
import torch
from trencadis_torch import native_build
from trencadis_torch.linear import native, native_decoder
from trencadis_torch.linear.held import FloatWeight
from trencadis_torch.linear.packed import pack
from trencadis_torch.attention import native as attention
assert native_build.__file__.startswith(sys.argv[1]), native_build.__file__
native_build.limit_instructions(sys.argv[2])
sources = [native_build.Source(path) for path in (native.SOURCE, native_decoder.SOURCE)]
sources.append(attention.source_for(frozenset({torch.float32})))
before = native_build.openmp_runtime()
for source in sources:
    native_build.load_library(source, directory=Path(sys.argv[3]))
library = native.Native(native_build.load_library(sources[0]))
torch.set_num_threads(2)
x, weight = torch.randn(64, 512), torch.randn(1024, 512)
layer = pack([FloatWeight(weight)], [None], library)
torch.testing.assert_close(layer(x), x @ weight.T, atol=1e-3, rtol=1e-3)
assert native_build.openmp_runtime() == before
print("ran")
"""


@pytest.mark.nightly  # what is compiled here: tests/backends/trencadis_torch/test_native_build.py
@pytest.mark.skipif(
    find_compiler() is None or chosen_set() is None, reason="no compiler, or no instruction set of ours"
)
def test_wheel_brings_kernels_that_run_where_there_is_no_compiler(tmp_path: Path) -> None:
    """One instruction set, for all take half a minute of both cores; it is not the best one that this machine has."""
    first = next(one for one in SETS if one.machine == platform.machine())
    archive, _ = built(tmp_path / "wheel", kernels=first.name)
    names = {Path(name).name for name in archive.namelist() if name.startswith("trencadis_torch/prebuilt/")}
    assert names == {library_name(source, first, texts_of(source)) for source in SOURCES}
    assert archive.filename is not None
    assert archive.filename.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    archive.extractall(tmp_path / "site")
    command = [sys.executable, "-c", ATTENDS, str(tmp_path / "site"), first.name, str(tmp_path / "cache")]
    result = subprocess.run(
        command, env={"PATH": str(tmp_path), "HOME": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert result.stdout == "ran\n", result.stderr
    assert not (tmp_path / "cache").exists()


def test_each_kernel_is_compiled_for_the_first_set_of_each_machine() -> None:
    for one in SETS:
        assert one.before or all(narrowed(one, texts_of(source)) == one for source in SOURCES)
