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
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRENCADIS_WHEEL_KERNELS": "none"}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=600)


def said(*command: str | Path, cwd: Path) -> str:
    """Return what a command prints that must work."""
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return done.stdout


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The interpreter of a fresh environment with all wheels; what they need comes from the one that runs the tests."""
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip install -e '.[dev]'")
    pytest.importorskip("pip", reason="pip is not installed in this environment")
    home = tmp_path / "wheels"
    home.mkdir()
    for project in (ROOT, EXAMPLE, STAGE):
        said(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", home, cwd=project)
    said(sys.executable, "-m", "venv", "--without-pip", home / "fresh", cwd=home)
    fresh = home / "fresh" / "bin" / "python"
    (site,) = (home / "fresh" / "lib").glob("python*/site-packages")
    command = [sys.executable, "-m", "pip", "--python", fresh, "install", "--quiet", "--no-index", "--no-deps"]
    said(*command, *sorted(home.glob("*.whl")), cwd=home)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return fresh


@pytest.mark.nightly  # their tests, as they lie here: below
def test_both_packages_work_from_their_wheels_with_their_own_tests_and_provenance(python: Path, tmp_path: Path) -> None:
    code = "import trencadis, trencadis_bucketing_fibonacci as f; print(trencadis.__file__); print(f.__file__)"
    places = said(python, "-c", code, cwd=tmp_path).split()
    assert all(Path(line).is_relative_to(python.parents[1]) for line in places), places

    shown = said(python, "-m", "trencadis", "plugins", "--json", "--bucketing.name", "fibonacci", cwd=tmp_path)
    (row,) = (row for row in json.loads(shown)["components"] if row["name"] == "fibonacci")
    assert (row["noun"], row["active"], row["plugin"]) == ("bucketing", True, "bucketing-fibonacci")
    assert (row["distribution"], row["version"]) == ("trencadis-bucketing-fibonacci", "0.1.0")

    config = ["--bucketing.name", "fibonacci", "--bucketing.fibonacci.smallest-query=16", "--bucketing.fallback="]
    device = ["--backend.torch.layout", "padded", "--engine.warmup=false", "--cache.num-blocks=64"]
    words = ["generate", "Once upon a time", "--max-tokens", "8", "--temperature", "0", "--json"]
    answer = json.loads(said(python, "-m", "trencadis", *words, *config, *device, cwd=tmp_path))
    assert (len(answer["token_ids"]), answer["finish_reason"]) == (8, "length")

    for example in (EXAMPLE, STAGE):
        home = tmp_path / example.name
        shutil.copytree(example / "tests", home / "tests")
        shutil.copy(example / "pyproject.toml", home)
        assert " passed" in said(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=home)


@pytest.mark.parametrize(
    ("example", "entry"),
    [
        (EXAMPLE, 'bucketing-fibonacci = "trencadis_bucketing_fibonacci"'),
        (STAGE, 'token-cap = "trencadis_token_cap"'),
    ],
    ids=lambda one: getattr(one, "name", None),
)
def test_a_third_party_s_package_passes_its_suite_without_an_edit_of_the_core(example: Path, entry: str) -> None:
    code = "import pathlib, sys, pytest; home = pathlib.Path(sys.argv[1]); sys.path.insert(0, str(home / 'src')); "
    code += "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', *map(str, home.glob('tests/test_[ft]*.py'))]))"
    said(sys.executable, "-c", code, example, cwd=example)
    assert entry in (example / "pyproject.toml").read_text()
    assert list(example.glob("src/*/py.typed"))
