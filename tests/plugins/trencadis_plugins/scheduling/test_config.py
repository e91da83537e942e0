from __future__ import annotations

import attrs
import pytest

from trencadis_plugins.scheduling import trencadis_scheduling_policies
from trencadis_plugins.scheduling.config import FcfsConfig, PrefillFirstConfig, PriorityConfig
from trencadis_plugins.scheduling.victims import VICTIMS

CONFIGS = {component.name: component.config for component in trencadis_scheduling_policies()}
FIELDS = [(name, field) for name, config in CONFIGS.items() for field in attrs.fields(config)]


def test_no_number_may_be_negative():
    for name, field in FIELDS:
        if type(field.default) in (int, float):
            with pytest.raises(ValueError, match=field.name):
                CONFIGS[name](**{field.name: -1})


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: FcfsConfig(chunk_sizes=(0,)),
        lambda: FcfsConfig(chunk_sizes=(1.5,)),
        lambda: PrefillFirstConfig(watermark_ratio=0.005),
    ],
)
def test_what_makes_no_sense_is_refused(mistake):
    with pytest.raises((ValueError, TypeError)):
        mistake()


def test_every_choice_of_victim_can_be_configured():
    for name in VICTIMS:
        assert FcfsConfig(victim=name).victim == name
        assert name in attrs.fields(FcfsConfig).victim.metadata["help"]


def test_a_policy_about_priority_takes_blocks_from_the_least_urgent():
    assert PriorityConfig().victim == "lowest_priority"


def test_the_inner_policy_of_fair_share_is_a_scheduling_component():
    assert attrs.fields(CONFIGS["fair_share"]).inner.metadata["component"] == "scheduling"
