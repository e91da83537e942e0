"""The package is installed, and offers what it says."""

from __future__ import annotations

import importlib.metadata

from trencadis.cli import main

import trencadis_bucketing_fibonacci


def test_entry_point_names_the_package() -> None:
    found = {point.name: point.value for point in importlib.metadata.entry_points(group="trencadis")}
    assert found.get("bucketing-fibonacci") == "trencadis_bucketing_fibonacci", "run pip install -e ."


def test_hook_offers_the_component_with_its_config(trencadis_registry) -> None:
    trencadis_registry.register(trencadis_bucketing_fibonacci)
    registered = trencadis_registry.components("bucketing")["fibonacci"]
    assert registered.component.config().smallest_query == 8
    assert registered.component.summary


def test_command_prints_the_sizes(capsys) -> None:
    assert main(["fibonacci", "20", "--smallest", "3"]) == 0
    assert capsys.readouterr().out == "3 5 8 13 20\n"
