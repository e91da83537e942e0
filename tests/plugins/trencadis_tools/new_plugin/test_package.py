"""Packages are installed in an environment without extras, where their tests run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.fresh_venv import FreshVenv
from support.nouns import ALL_NOUNS
from trencadis.errors import ConfigValueError
from trencadis_tools.new_plugin import STAGE, PluginNames, new_plugin
from trencadis_tools.new_plugin.package import files_of

SHORT, LONG = "ab", "a_name_as_long_as_can_be"
KINDS = (*ALL_NOUNS, STAGE)
TESTS = Path(__file__).parents[3]


def run(*command: str | Path, cwd: Path, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{TESTS}", "OMP_NUM_THREADS": "1"}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [("bucketing", STAGE), pytest.param(KINDS, marks=pytest.mark.nightly)])
def test_packages_pass_their_tests_with_the_extra_that_they_name_and_no_other(tmp_path: Path, kinds: tuple[str, ...]):
    venv = FreshVenv.make(tmp_path / "venv", extras=("test",))
    homes = [new_plugin(PluginNames.read(noun, f"my_{noun}"), tmp_path)[0] for noun in kinds]
    # The first brings what all of them test with.
    asked = [f"-e './{home.name}[test]'" if home is homes[0] else f"-e ./{home.name}" for home in homes]
    venv.run(f"pip install --quiet {' '.join(asked)}", cwd=tmp_path)
    folders = " ".join(f"{home.name}/tests" for home in homes)
    venv.run(f"pytest -q -p no:cacheprovider --import-mode=importlib --rootdir . {folders}", cwd=tmp_path)


@pytest.mark.nightly  # that the suite finds such a fault: tests/testing/test_sampling.py
def test_a_samplers_rule_is_tested_although_its_defaults_switch_it_off(tmp_path: Path):
    home, _ = new_plugin(PluginNames.read("sampling", "lottery"), tmp_path)
    module = home / "src" / "trencadis_sampling_lottery" / "lottery.py"
    rule = module.read_text()
    broken = rule.replace("logits.amax(-1, keepdim=True)", "logits.amax()")
    assert broken != rule
    module.write_text(broken)
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/test_lottery.py")
    tested = run(*command, cwd=home, path=home / "src")
    assert tested.returncode == 1, tested.stdout[-3000:]
    assert "TestLottery::test_a_row_depends_on_nothing_else_in_the_batch" in tested.stdout
    assert "FAILED tests/test_lottery.py::TestLotterySampler" not in tested.stdout  # which sees the defaults only


@pytest.mark.representatives(1)
@pytest.mark.parametrize("name", [SHORT, "lottery", LONG])
def test_packages_of_every_kind_please_the_linter_whatever_their_name(tmp_path: Path, name: str):
    ruff = shutil.which("ruff") or shutil.which("ruff", path=str(Path(sys.executable).parent))
    if ruff is None:
        pytest.skip("ruff is not installed: pip install -e '.[dev]'")
    for noun in KINDS:
        home, _ = new_plugin(PluginNames.read(noun, name), tmp_path)
        checked = run(ruff, "check", "--no-cache", ".", cwd=home, path=tmp_path)
        assert checked.returncode == 0, checked.stdout
        if name == "lottery":
            formatted = run(ruff, "format", "--no-cache", "--check", ".", cwd=home, path=tmp_path)
            assert formatted.returncode == 0, formatted.stdout


@pytest.mark.parametrize("noun", KINDS)
def test_files_are_complete_and_say_what_they_are(noun: str):
    files = files_of(PluginNames.read(noun, "lottery"))
    package = f"trencadis_{noun}_lottery"
    assert set(files) == {
        "pyproject.toml",
        "README.md",
        ".gitignore",
        f"src/{package}/__init__.py",
        f"src/{package}/config.py",
        f"src/{package}/lottery.py",
        f"src/{package}/py.typed",
        "tests/test_lottery.py",
        "tests/test_plugin.py",
    }
    project = tomllib.loads(files["pyproject.toml"])["project"]
    assert project["name"] == f"trencadis-{noun}-lottery".replace("_", "-")
    assert project["entry-points"]["trencadis"] == {f"{noun}-lottery".replace("_", "-"): package}
    assert [text for text in files.values() if "$" in text.replace("$ ", "")] == []


def test_config_example_of_the_readme_loads(tmp_path: Path):
    from trencadis.config import load_config, settings_of
    from trencadis_kv import NOUNS as NOUNS_OF_KV

    for noun in KINDS:
        files = files_of(PluginNames.read(noun, "lottery"))
        example = files["README.md"].split("```toml\n")[1].split("```")[0]
        file = tmp_path / f"{noun}.toml"
        file.write_text(example)
        scope: dict[str, object] = {}
        code = files[f"src/trencadis_{noun}_lottery/config.py"].replace("from __future__ import annotations", "")
        exec(code, scope)  # the class that the example's table must fit
        table = scope["LotteryConfig"]
        settings = settings_of({"lottery": table} if noun == STAGE else {noun: {"lottery": table}}, NOUNS_OF_KV)
        config = load_config(settings=settings, file=file, environ={}).config
        assert "lottery" in (config.tables if noun == STAGE else config.noun(noun).components)


def test_a_folder_that_exists_or_cannot_be_made_is_never_written_to(tmp_path: Path):
    names = PluginNames.read("eviction", "lottery")
    (tmp_path / names.project).mkdir()
    (tmp_path / names.project / "README.md").write_text("mine")
    with pytest.raises(ConfigValueError, match="exists already; nothing was written"):
        new_plugin(names, tmp_path)
    assert (tmp_path / names.project / "README.md").read_text() == "mine"
    assert len(list((tmp_path / names.project).iterdir())) == 1
    for place, words in ((tmp_path / "nowhere", "is no directory"), (Path("/proc"), "cannot be made")):
        with pytest.raises(ConfigValueError, match=words):
            new_plugin(names, place)


@pytest.mark.nightly
def test_packages_of_every_kind_pass_their_own_type_check(tmp_path: Path):
    """All in one run: what they import is then checked once."""
    pytest.importorskip("mypy", reason="mypy is not installed: pip install -e '.[dev]'")
    homes = [new_plugin(PluginNames.read(noun, f"my_{noun}"), tmp_path)[0] for noun in KINDS]
    path = os.pathsep.join(str(home / "src") for home in homes)
    packages = [word for home in homes for word in ("-p", home.name.replace("-", "_"))]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), *packages],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert checked.returncode == 0, checked.stdout
