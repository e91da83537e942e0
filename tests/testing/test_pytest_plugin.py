from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_simulated_clock_stands_at_zero_until_told(simulated_clock):
    assert simulated_clock.now_s() == 0.0
    simulated_clock.advance(1.5)
    assert simulated_clock.now_s() == 1.5


def test_registry_holds_no_plugin_that_happens_to_be_installed(trencadis_registry):
    from trencadis.hookspecs import NOUNS

    assert dict(trencadis_registry.plugins) == {}
    assert [name for noun in NOUNS for name in trencadis_registry.components(noun)] == []


def test_registry_takes_a_plugin_given_in_code(trencadis_registry):
    from trencadis import Component, hookimpl

    class Plugin:
        @hookimpl
        def trencadis_observers(self):
            yield Component(name="mine", factory=lambda config, context: None, summary="Mine.", interface_version=1)

    trencadis_registry.register(Plugin())
    assert list(trencadis_registry.components("observer")) == ["mine"]


def test_plugin_loads_nothing_of_trencadis_at_start_up():
    """pytest imports it in every run on the machine, and before coverage starts."""
    code = (
        "import sys, trencadis_testing.pytest_plugin\n"
        "loaded = [m for m in sys.modules if m.split('.')[0] in ('trencadis', 'numpy', 'torch')]\n"
        "sys.exit(', '.join(loaded) or 0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "core")}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.slow
def test_failure_names_the_rule_the_value_and_the_page(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from trencadis_plugins.bucketing.exact import Exact\n"
        "class Mine(Exact):\n"
        "    def __init__(self, limits):\n"
        "        pass\n"
        "    def buckets(self, limits):\n"
        "        return []\n"
    )
    environment = {**os.environ, "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "trencadis_testing.pytest_plugin", "-p", "no:cacheprovider"]
    command += ["--trencadis-conform", "bucketing=mine:Mine", "-k", "sorted and tiny"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "buckets() returned list, not a tuple" in run.stdout
    assert "table holds buckets sorted without duplicates: Prefill comes before decode" in run.stdout
    assert "See docs/plugins/bucketing.md" in run.stdout


MISSPELLED = """
import sys

import torch
from trencadis.interfaces import SchedulingPolicy
from trencadis_testing import SchedulingConformance


class Misspelled(SchedulingPolicy):
    def order(self, view):
        return view.waiting[view.arival_s[view.waiting].argsort()]


class TestMisspelled(SchedulingConformance):
    make = Misspelled

    def test_torch_has_one_thread(self):
        assert torch.get_num_threads() == 1


def test_elsewhere_torch_has_its_threads():
    assert torch.get_num_threads() == 3


torch.set_num_threads(3)
"""


def test_a_suite_names_the_columns_that_there_are_and_what_it_left_out(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(MISSPELLED)
    chosen = "first_come or many_long or declared or torch"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-k", chosen, "test_mine.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 'Did you mean "arrival_s"? SchedulerView has: arrival_s, block_size, first_token_s, ' in run.stdout
    assert "60 histories take half a second or more each: run them with --trencadis-all-histories" in run.stdout
    assert 'one that does sets declares = frozenset({"fairness"}) in its test class' in run.stdout
    assert "1 failed, 2 passed, 6 skipped" in run.stdout
