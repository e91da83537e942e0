from __future__ import annotations

import sys

import pytest

from trencadis.clock import SimulatedClock
from trencadis.interfaces import AcceptanceRule, ComponentContext
from trencadis.interfaces.acceptance import INTERFACE_VERSION
from trencadis_plugins.acceptance import trencadis_acceptance_rules
from trencadis_plugins.acceptance.config import TypicalConfig

COMPONENTS = {component.name: component for component in trencadis_acceptance_rules()}
CONTEXT = ComponentContext(clock=SimulatedClock(), seed=0)


def test_hook_yields_every_rule_for_the_present_interface():
    assert list(COMPONENTS) == ["match", "token", "block", "tree", "typical"]
    assert {component.interface_version for component in COMPONENTS.values()} == {INTERFACE_VERSION}


@pytest.mark.parametrize("component", COMPONENTS.values(), ids=COMPONENTS.keys())
def test_factory_makes_a_new_rule_of_the_named_file(component):
    first, second = (component.factory(component.config(), CONTEXT) for _ in range(2))
    assert isinstance(first, AcceptanceRule)
    assert first is not second
    assert type(first).__module__ == f"trencadis_plugins.acceptance.{component.name}"


@pytest.mark.parametrize("component", COMPONENTS.values(), ids=COMPONENTS.keys())
def test_rules_that_read_distributions_require_a_sampler_that_gives_them(component):
    rule = component.factory(component.config(), CONTEXT)
    assert component.requires == (frozenset({"sampling.distributions"}) if rule.needs_distributions else frozenset())


def test_lossy_rules_say_so_in_their_summary():
    lossy = {name for name, one in COMPONENTS.items() if not one.factory(one.config(), CONTEXT).lossless}
    assert lossy == {"typical"}
    assert "Lossy" in COMPONENTS["typical"].summary


def test_factory_hands_the_options_on():
    made = COMPONENTS["typical"].factory(TypicalConfig(epsilon=0.5, delta=2.0), CONTEXT)
    assert (made._epsilon, made._delta) == (0.5, 2.0)


def test_registering_imports_no_rule():
    saved = {name: sys.modules.pop(name) for name in list(sys.modules) if name == "trencadis_plugins.acceptance.block"}
    try:
        list(trencadis_acceptance_rules())
        assert "trencadis_plugins.acceptance.block" not in sys.modules
    finally:
        sys.modules.update(saved)
