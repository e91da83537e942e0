"""``pytest --kv-connector=TARGET`` in another project, with and without test modules of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHELF = """
import attrs
from trencadis.interfaces import ConnectorPair
from trencadis_kv.store.settings import StoreSettings
from trencadis_kv.store.store_connector import store_connector
from trencadis_testing.kv_faults import DictStore

SHARED = {}

def make_shelf(context, *, room="none") -> ConnectorPair:
    with open("rooms.txt", "a") as log:
        log.write(room + "\\n")
    objects = {}
    return store_connector(lambda: DictStore(objects), StoreSettings(), context, name="shelf")
"""
MODULE = """
import pytest
from trencadis_testing import KVConnectorConformance
from trencadis_testing.kv_option import NamedConnector

class TestContract(NamedConnector, KVConnectorConformance):
    targets = ("shelf:make_shelf,room=own",)

def test_of_something_else():
    pass
"""
CONFTEST = """
import pytest

@pytest.fixture
def kv_connector_options(kv_connector_target):
    return {"room": "fixture"} if "room" not in kv_connector_target else {}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "shelf.py").write_text(SHELF)
    (tmp_path / "test_shelf.py").write_text(MODULE)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    return tmp_path


def run(
    project: Path, *arguments: str, only: str = "bit_for_bit or transfer_ids or shared_prefix"
) -> tuple[str, set[str]]:
    """Return what pytest printed, and the rooms that were asked for."""
    rooms = project / "rooms.txt"
    rooms.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(project), "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # importing the others takes longer than the rest
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "trencadis_testing.pytest_plugin", "-k", only, *arguments],
        env=environment, cwd=project, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr, set(rooms.read_text().split()) if rooms.exists() else set()


@pytest.mark.slow
def test_modules_that_take_the_target_are_run_against_the_option_and_others_as_ever(project: Path):
    text, rooms = run(project, "--kv-connector=shelf:make_shelf", "test_shelf.py", only="bit_for_bit or else")
    assert "bit_for_bit[shelf:make_shelf] PASSED" in text
    assert "test_of_something_else PASSED" in text
    assert "2 passed" in text
    assert rooms == {"fixture"}


@pytest.mark.slow
def test_without_a_path_both_suites_of_the_kit_are_run(project: Path):
    text, rooms = run(project, "--kv-connector=shelf:make_shelf,room=given")
    assert (
        "kv_connector=shelf:make_shelf,room=given::KVConnectorConformance::test_transfer_ids_are_unique PASSED" in text
    )
    assert (
        "KVFaultConformance::test_shared_prefix_of_requests_waiting_for_kv_survives_a_failed_load[True] PASSED" in text
    )
    assert "4 passed" in text
    assert "test_of_something_else" not in text
    assert rooms == {"given"}


@pytest.mark.slow
def test_a_target_that_there_is_not_is_named_on_the_command_line(project: Path):
    text, _ = run(project, "--kv-connector=shelff")
    assert "no such component" in text
    assert "shelff" in text


@pytest.mark.slow
def test_a_store_that_keeps_what_earlier_tests_left_passes(tmp_path: Path) -> None:
    only = "test_shared_prefix or does_not_keep_what_it_is_given"
    option = f"--kv-connector=filesystem,path={tmp_path / 'kv'}"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "trencadis_testing.pytest_plugin",
        "-p",
        "no:cacheprovider",
        option,
    ]
    environment = {**os.environ, "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [*command, "-k", only], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
