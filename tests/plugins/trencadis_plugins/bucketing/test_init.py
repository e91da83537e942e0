from __future__ import annotations

import attrs
import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import ContractError
from trencadis.interfaces import ComponentContext
from trencadis.interfaces.bucketing import INTERFACE_VERSION, BucketingStrategy
from trencadis_plugins.bucketing import trencadis_bucketings
from trencadis_plugins.bucketing.config import ExponentialConfig, FromFileConfig
from trencadis_testing.bucketing import SAMPLE_LIMITS

NAMES = ["exact", "exponential", "linear", "padding_aware", "unified", "from_file"]
CONTEXT = ComponentContext(clock=SimulatedClock(), seed=0, limits=SAMPLE_LIMITS["uneven"])


def components():
    return {component.name: component for component in trencadis_bucketings()}


def test_hook_yields_the_built_in_strategies():
    assert set(components()) >= set(NAMES)
    assert {component.interface_version for component in components().values()} == {INTERFACE_VERSION}


@pytest.fixture
def config_of(tmp_path):
    """The smallest config of a component."""
    path = tmp_path / "buckets.txt"
    path.write_text("(1, 100, 0)\n(7, 1, 112)\n")
    return lambda component: (
        FromFileConfig(path=str(path)) if component.config is FromFileConfig else component.config()
    )


@pytest.mark.parametrize("name", NAMES)
def test_factory_makes_a_strategy_of_its_own_name(name, config_of):
    component = components()[name]
    strategy = component.factory(config_of(component), CONTEXT)
    assert isinstance(strategy, BucketingStrategy)
    assert type(strategy).__name__.lower() == name.replace("_", "")


@pytest.mark.parametrize("name", NAMES[1:])
def test_factory_without_limits_says_so(name, config_of):
    component = components()[name]
    with pytest.raises(ContractError, match=f"{name} was built without shape limits"):
        component.factory(config_of(component), attrs.evolve(CONTEXT, limits=None))


def test_factory_hands_on_the_config():
    component = components()["exponential"]
    strategy = component.factory(ExponentialConfig(limit=1), CONTEXT)
    assert len(strategy.buckets(SAMPLE_LIMITS["uneven"])) == 2
