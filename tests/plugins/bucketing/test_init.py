from __future__ import annotations

import attrs
import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import ContractError
from trencadis.interfaces import ComponentContext
from trencadis.interfaces.bucketing import INTERFACE_VERSION, BucketingStrategy
from trencadis_plugins.bucketing import trencadis_bucketings
from trencadis_plugins.bucketing.config import ExponentialConfig
from trencadis_testing.bucketing import SAMPLE_LIMITS

CONTEXT = ComponentContext(clock=SimulatedClock(), seed=0, limits=SAMPLE_LIMITS["uneven"])


def components():
    return {component.name: component for component in trencadis_bucketings()}


def test_hook_yields_the_built_in_strategies():
    assert list(components()) == ["exact", "exponential", "linear"]
    assert {component.interface_version for component in components().values()} == {INTERFACE_VERSION}


@pytest.mark.parametrize("name", ["exact", "exponential", "linear"])
def test_factory_makes_a_strategy_of_its_own_name(name):
    component = components()[name]
    strategy = component.factory(component.config(), CONTEXT)
    assert isinstance(strategy, BucketingStrategy)
    assert type(strategy).__name__.lower() == name


@pytest.mark.parametrize("name", ["exponential", "linear"])
def test_factory_without_limits_says_so(name):
    component = components()[name]
    with pytest.raises(ContractError, match=f"{name} was built without shape limits"):
        component.factory(component.config(), attrs.evolve(CONTEXT, limits=None))


def test_factory_hands_on_the_config():
    component = components()["exponential"]
    strategy = component.factory(ExponentialConfig(limit=1), CONTEXT)
    assert len(strategy.buckets(SAMPLE_LIMITS["uneven"])) == 2
