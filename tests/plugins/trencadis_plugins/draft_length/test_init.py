from __future__ import annotations

import pytest

from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext, DraftLength
from trencadis_plugins.draft_length import trencadis_draft_lengths

COMPONENTS = {component.name: component for component in trencadis_draft_lengths()}


def test_there_are_three_draft_lengths():
    assert set(COMPONENTS) == {"fixed", "table", "goodput"}


@pytest.mark.parametrize("name", COMPONENTS)
def test_factory_makes_a_draft_length_named_as_the_component(name):
    component = COMPONENTS[name]
    made = component.factory(component.config(), ComponentContext(clock=SimulatedClock(), seed=0))
    assert isinstance(made, DraftLength)
    assert type(made).__name__.lower() == name
    assert component.summary
