from __future__ import annotations

import subprocess
import sys

import attrs
import pytest

import trencadis_gallery
from trencadis.clock import SimulatedClock
from trencadis.config import load_config
from trencadis.errors import ConfigError, ContractError
from trencadis.hookspecs import NOUNS
from trencadis.interfaces import ComponentContext
from trencadis.registry.contracts import CONTRACTS
from trencadis_gallery.config import (
    FittedConfig,
    MultiLevelConfig,
    S3FifoConfig,
    SlruConfig,
    SyntheticConfig,
    TwoQueueConfig,
)

COMPONENTS = {
    f"{noun}.{one.name}": one
    for noun, hook in NOUNS.items()
    if hasattr(trencadis_gallery, hook)
    for one in getattr(trencadis_gallery, hook)()
}
CONTEXT = ComponentContext(clock=SimulatedClock(), seed=0)


def test_the_gallery_has_strategies_of_four_nouns() -> None:
    assert set(COMPONENTS) == {
        *("eviction.slru", "eviction.two_queue", "eviction.s3_fifo", "eviction.arc"),
        *("scheduling.multi_level", "bucketing.fitted", "acceptance.synthetic"),
    }


@pytest.mark.parametrize("path", sorted(set(COMPONENTS) - {"bucketing.fitted"}))
def test_factory_makes_a_new_strategy_of_the_named_file(path: str) -> None:
    component = COMPONENTS[path]
    first, second = (component.factory(component.config(), CONTEXT) for _ in range(2))
    assert isinstance(first, CONTRACTS[path.partition(".")[0]])
    assert first is not second
    assert type(first).__module__ == f"trencadis_gallery.{path}"


def test_fitted_without_limits_says_so() -> None:
    with pytest.raises(ContractError, match="fitted was built without shape limits"):
        COMPONENTS["bucketing.fitted"].factory(FittedConfig(), CONTEXT)


def test_registering_imports_no_strategy() -> None:
    code = (
        "import sys, trencadis_gallery; print(*(name for name in sys.modules if name.startswith('trencadis_gallery.')))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {f"trencadis_gallery.{path}" for path in COMPONENTS} & set(found)


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (SlruConfig, "protected_uses", 0),
        (SlruConfig, "protected_ratio", 1.5),
        (TwoQueueConfig, "new_ratio", -0.1),
        (S3FifoConfig, "small_ratio", 2.0),
        *(
            (MultiLevelConfig, one.name, -1)
            for one in attrs.fields(MultiLevelConfig)
            if type(one.default) in (int, float)
        ),
        (MultiLevelConfig, "quantum_tokens", 0),
    ],
)
def test_value_out_of_range_is_refused(config: type, key: str, value: float) -> None:
    with pytest.raises(ValueError, match=key):
        config(**{key: value})


@pytest.mark.parametrize("component", COMPONENTS.values(), ids=COMPONENTS)
def test_every_field_says_what_it_means(component) -> None:
    assert all(field.metadata["help"].endswith(".") for field in attrs.fields(component.config) if field.name != "cost")


def load(*flags: str):
    components = {"acceptance": {"synthetic": SyntheticConfig}}
    return load_config(components=components, environ={}, flags=list(flags)).config.acceptance.components["synthetic"]


def test_rates_are_read_from_one_flag() -> None:
    assert load("--acceptance.synthetic.rates=0.9,0.5").rates == (0.9, 0.5)


@pytest.mark.parametrize("flag", ["rates=1.1", "rates=0.5,-0.1", "mean-tokens=0.5", "mean-tokens=-1"])
def test_a_rate_or_a_mean_out_of_range_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError):
        load(f"--acceptance.synthetic.{flag}")


def test_a_mean_becomes_rates_of_one_a_share_and_none() -> None:
    assert SyntheticConfig(mean_tokens=3.25).place_rates() == (1.0, 1.0, 0.25, 0.0)
    assert SyntheticConfig(mean_tokens=1.0).place_rates() == (0.0, 0.0)
    assert SyntheticConfig(rates=(0.3,)).place_rates() == (0.3,)
