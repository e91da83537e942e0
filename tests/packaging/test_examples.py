"""The example packages, from their wheels, beside ours from its wheel, in an environment where nothing else of this tree is seen."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "trencadis-bucketing-fibonacci"
STAGE = ROOT / "examples" / "token_cap"


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "TRENCADIS"))}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=600)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with all wheels; what they need comes from the one that runs the tests."""
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip install -e '.[dev]'")
    pytest.importorskip("pip", reason="pip is not installed in this environment")
    home = tmp_path_factory.mktemp("examples")
    for project in (ROOT, EXAMPLE, STAGE):
        built = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", home, cwd=project)
        assert built.returncode == 0, built.stderr
    made = run(sys.executable, "-m", "venv", "--without-pip", home / "fresh", cwd=home)
    assert made.returncode == 0, made.stderr
    fresh = home / "fresh" / "bin" / "python"
    wheels = sorted(home.glob("*.whl"))
    (site,) = (home / "fresh" / "lib").glob("python*/site-packages")
    command = [sys.executable, "-m", "pip", "--python", fresh, "install", "--quiet", "--no-index", "--no-deps"]
    installed = run(*command, *wheels, cwd=home)
    assert installed.returncode == 0, installed.stderr
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return fresh


@pytest.mark.slow
def test_both_packages_come_from_their_wheels(python: Path, tmp_path: Path) -> None:
    code = "import trencadis, trencadis_bucketing_fibonacci as f; print(trencadis.__file__); print(f.__file__)"
    shown = run(python, "-c", code, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert all(Path(line).is_relative_to(python.parents[1]) for line in shown.stdout.split()), shown.stdout


@pytest.mark.slow
def test_plugins_command_shows_it_with_its_provenance(python: Path, tmp_path: Path) -> None:
    shown = run(python, "-m", "trencadis", "plugins", "--json", "--bucketing.name", "fibonacci", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    (row,) = (row for row in json.loads(shown.stdout)["components"] if row["name"] == "fibonacci")
    assert (row["noun"], row["active"]) == ("bucketing", True)
    assert (row["distribution"], row["version"]) == ("trencadis-bucketing-fibonacci", "0.1.0")
    assert row["plugin"] == "bucketing-fibonacci"


@pytest.mark.slow
@pytest.mark.parametrize("example", [EXAMPLE, STAGE], ids=lambda path: path.name)
def test_its_own_tests_pass_with_its_own_settings(python: Path, tmp_path: Path, example: Path) -> None:
    shutil.copytree(example / "tests", tmp_path / "tests")
    shutil.copy(example / "pyproject.toml", tmp_path)
    tested = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path)
    assert tested.returncode == 0, tested.stdout[-3000:] + tested.stderr[-1000:]
    assert " passed" in tested.stdout


@pytest.mark.slow
def test_it_serves_the_demo_model_and_its_option_is_a_flag(python: Path, tmp_path: Path) -> None:
    config = ["--bucketing.name", "fibonacci", "--bucketing.fibonacci.smallest-query=16", "--bucketing.fallback="]
    device = ["--backend.torch.layout", "padded", "--engine.warmup=false", "--cache.num-blocks=64"]
    words = ["generate", "Once upon a time", "--max-tokens", "8", "--temperature", "0", "--json"]
    shown = run(python, "-m", "trencadis", *words, *config, *device, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    (answer,) = (json.loads(line) for line in shown.stdout.splitlines())
    assert len(answer["token_ids"]) == 8
    assert answer["finish_reason"] == "length"


def test_stage_of_a_third_party_passes_its_suite_without_an_edit_of_the_core(tmp_path: Path) -> None:
    code = "import pathlib, sys, pytest; home = pathlib.Path(sys.argv[1]); sys.path.insert(0, str(home / 'src')); "
    code += "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', str(home / 'tests' / 'test_token_cap.py')]))"
    tested = run(sys.executable, "-c", code, STAGE, cwd=STAGE)
    assert tested.returncode == 0, tested.stdout[-3000:] + tested.stderr[-1000:]


def test_it_is_typed_and_names_its_entry_point() -> None:
    assert (EXAMPLE / "src/trencadis_bucketing_fibonacci/py.typed").is_file()
    assert 'bucketing-fibonacci = "trencadis_bucketing_fibonacci"' in (EXAMPLE / "pyproject.toml").read_text()
    assert (STAGE / "src/trencadis_token_cap/py.typed").is_file()
    assert 'token-cap = "trencadis_token_cap"' in (STAGE / "pyproject.toml").read_text()
