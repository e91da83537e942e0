from __future__ import annotations

import inspect

import pytest

from trencadis.hookspecs import NOUNS
from trencadis.interfaces import scheduling
from trencadis.registry.contracts import CONTRACTS, interface_version, why_refused


def test_every_noun_has_a_contract_in_the_file_of_its_name():
    assert set(CONTRACTS) == set(NOUNS)
    assert {noun: inspect.getmodule(contract).__name__ for noun, contract in CONTRACTS.items()} == {
        noun: f"trencadis.interfaces.{noun}" for noun in NOUNS
    }


def test_every_interface_has_a_version():
    assert all(interface_version(noun) >= 1 for noun in NOUNS)


@pytest.mark.parametrize(
    ("version", "accepted"), [(1, False), (2, False), (3, True), (4, True), (5, False), (True, False)]
)
def test_this_version_and_the_one_before_are_accepted(monkeypatch, version, accepted):
    monkeypatch.setattr(scheduling, "INTERFACE_VERSION", 4)
    assert (why_refused("scheduling", version) == "") is accepted


def test_there_is_no_version_before_the_first(monkeypatch):
    monkeypatch.setattr(scheduling, "INTERFACE_VERSION", 1)
    assert why_refused("scheduling", 1) == ""
    assert "state the INTERFACE_VERSION of trencadis.interfaces.scheduling" in why_refused("scheduling", 0)


def test_the_reason_says_who_is_to_be_upgraded(monkeypatch):
    monkeypatch.setattr(scheduling, "INTERFACE_VERSION", 4)
    said = "it was written for version {} of the scheduling interface, and this Trencadís accepts 3 and 4: upgrade {}"
    assert why_refused("scheduling", 2) == said.format(2, "the plugin")
    assert why_refused("scheduling", 5) == said.format(5, "Trencadís")
