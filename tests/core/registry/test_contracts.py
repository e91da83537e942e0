from __future__ import annotations

import inspect

import pytest

from trencadis.hookspecs import NOUNS
from trencadis.interfaces import scheduling
from trencadis.registry.contracts import CONTRACTS, CORE_NOUNS, why_refused


def test_every_noun_has_a_contract_in_the_file_of_its_name():
    assert set(CONTRACTS) == set(NOUNS)
    assert {noun: inspect.getmodule(contract).__name__ for noun, contract in CONTRACTS.items()} == {
        noun: f"trencadis.interfaces.{noun}" for noun in NOUNS
    }


@pytest.mark.parametrize("noun", NOUNS)
def test_the_present_version_alone_is_accepted(noun):
    assert CORE_NOUNS[noun].interface_version == 1
    assert why_refused(CORE_NOUNS[noun], 1) == ""
    said = f"version 2 of the {noun} interface, and this Trencadís accepts 1: upgrade Trencadís"
    assert why_refused(CORE_NOUNS[noun], 2) == f"it was written for {said}"


@pytest.mark.parametrize("version", [0, -1, True, 1.0, "1", None])
def test_what_is_no_number_of_a_version_is_refused(version):
    assert "state the number that trencadis.interfaces.scheduling had" in why_refused(CORE_NOUNS["scheduling"], version)


def test_a_version_before_the_present_one_is_refused_and_the_reason_says_where_to_read(monkeypatch):
    monkeypatch.setattr(scheduling, "INTERFACE_VERSION", 4)
    assert why_refused(CORE_NOUNS["scheduling"], 3) == (
        "it was written for version 3 of the scheduling interface, and this Trencadís accepts 4: upgrade the plugin, or read "
        "beside INTERFACE_VERSION in trencadis.interfaces.scheduling what to change in it"
    )
