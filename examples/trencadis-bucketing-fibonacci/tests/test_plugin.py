"""The package is installed, and offers what it says."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

from trencadis.interfaces import bucketing

import trencadis_bucketing_fibonacci


def test_entry_point_names_the_package() -> None:
    found = {point.name: point.value for point in importlib.metadata.entry_points(group="trencadis")}
    assert found.get("bucketing-fibonacci") == "trencadis_bucketing_fibonacci", "run pip install -e ."


def test_hook_offers_the_component_with_its_config(trencadis_registry) -> None:
    trencadis_registry.register(trencadis_bucketing_fibonacci)
    registered = trencadis_registry.components("bucketing")["fibonacci"]
    assert registered.component.config().smallest_query == 8
    assert registered.component.summary


def test_command_prints_the_sizes() -> None:
    line = [sys.executable, "-m", "trencadis", "fibonacci", "20", "--smallest", "3"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stdout == "3 5 8 13 20\n"


def test_component_was_written_for_the_installed_contract() -> None:
    (component,) = trencadis_bucketing_fibonacci.trencadis_bucketings()
    assert component.interface_version == bucketing.INTERFACE_VERSION, (
        f"The package was written for version {component.interface_version} of the bucketing contract, and the installed "
        f"Trencadis has {bucketing.INTERFACE_VERSION}. Read in trencadis/interfaces/bucketing.py, beside INTERFACE_VERSION, what "
        "changed; follow it until the conformance suite passes, then write the new number as interface_version in __init__.py."
    )
