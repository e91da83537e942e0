from __future__ import annotations

import inspect

import pytest

from trencadis.hookspecs import NOUNS
from trencadis.interfaces import sampling, scheduling
from trencadis.registry.contracts import CONTRACTS, interface_version, why_refused


def test_every_noun_has_a_contract_in_the_file_of_its_name():
    assert set(CONTRACTS) == set(NOUNS)
    assert {noun: inspect.getmodule(contract).__name__ for noun, contract in CONTRACTS.items()} == {
        noun: f"trencadis.interfaces.{noun}" for noun in NOUNS
    }


def test_every_interface_has_a_version():
    assert all(interface_version(noun) >= 1 for noun in NOUNS)


@pytest.mark.parametrize(
    ("noun", "version", "accepted"),
    [
        ("scheduling", 3, False),
        ("scheduling", 4, True),
        ("scheduling", 5, False),
        ("scheduling", True, False),
        ("sampling", 1, True),
        ("sampling", 3, True),
        ("sampling", 0, False),
    ],
)
def test_the_current_version_is_accepted_and_older_ones_that_still_work(monkeypatch, noun, version, accepted):
    monkeypatch.setattr(scheduling, "INTERFACE_VERSION", 4)
    monkeypatch.setattr(sampling, "INTERFACE_VERSION", 3)
    assert (why_refused(noun, version) == "") is accepted


def test_what_is_no_number_of_a_version_is_refused():
    assert "state the number that trencadis.interfaces.scheduling had" in why_refused("scheduling", 0)


def test_the_reason_says_who_is_to_be_upgraded(monkeypatch):
    monkeypatch.setattr(scheduling, "INTERFACE_VERSION", 4)
    said = "it was written for version {} of the scheduling interface, and this Trencadís accepts 4: upgrade {}"
    older = "the plugin, or read beside INTERFACE_VERSION in trencadis.interfaces.scheduling what to change in it"
    assert why_refused("scheduling", 2) == said.format(2, older)
    assert why_refused("scheduling", 5) == said.format(5, "Trencadís")


def test_an_executor_of_version_1_whose_steps_would_all_fail_is_refused():
    """It makes outputs with one report of a KV connector, where each rank has one now."""
    assert "version 1 of the executor interface, and this Trencadís accepts 2" in why_refused("executor", 1)
