from __future__ import annotations

import sys

import attrs
import pytest

from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext, Speculator
from trencadis.interfaces.speculation import INTERFACE_VERSION
from trencadis_plugins.speculation import trencadis_speculators
from trencadis_plugins.speculation.config import NgramConfig
from trencadis_plugins.speculation.ngram import Ngram

COMPONENTS = {component.name: component for component in trencadis_speculators()}


def make(noun, name):
    return COMPONENTS[name].factory(COMPONENTS[name].config(), CONTEXT)


CONTEXT = ComponentContext(clock=SimulatedClock(), seed=0, make=make)


def test_hook_yields_every_speculator_for_the_present_interface():
    assert set(COMPONENTS) == {"ngram", "suffix", "draft_model", "parallel_draft", "head", "mixed"}
    assert {component.interface_version for component in COMPONENTS.values()} == {INTERFACE_VERSION}


@pytest.mark.parametrize("name", ["ngram", "suffix", "mixed"])
def test_factory_makes_a_new_speculator_of_the_named_file(name):
    first, second = (make("speculation", name) for _ in range(2))
    assert isinstance(first, Speculator)
    assert first is not second
    assert type(first).__module__ == f"trencadis_plugins.speculation.{name}"


def test_factory_hands_the_options_on():
    config = NgramConfig(max_draft_tokens=7)
    made = COMPONENTS["ngram"].factory(config, CONTEXT)
    assert isinstance(made, Ngram)
    assert made.max_draft_tokens == 7


def test_registering_imports_no_speculator():
    saved = {
        name: sys.modules.pop(name) for name in list(sys.modules) if name == "trencadis_plugins.speculation.suffix"
    }
    try:
        list(trencadis_speculators())
        assert "trencadis_plugins.speculation.suffix" not in sys.modules
    finally:
        sys.modules.update(saved)


@pytest.mark.parametrize("component", COMPONENTS.values(), ids=COMPONENTS.keys())
def test_every_setting_has_help_and_a_unit(component):
    for field in attrs.fields(component.config):
        assert field.metadata["help"], field.name
        assert "unit" in field.metadata, field.name
