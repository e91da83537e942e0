from __future__ import annotations

import attrs
import pytest

from trencadis.interfaces import setting
from trencadis_kv.store.settings import StoreSettings


def test_defaults_work():
    assert StoreSettings() == StoreSettings(namespace="default")


def test_every_setting_says_what_it_means_and_in_which_unit():
    for field in attrs.fields(StoreSettings):
        assert field.metadata["help"].endswith(".")
        is_number = field.type in ("int", "float")
        assert bool(field.metadata["unit"]) == is_number, field.name


@pytest.mark.parametrize(
    "wrong",
    [
        {"namespace": "../up"},
        {"namespace": ""},
        {"numerics": "some"},
        {"lookup_timeout_s": 0.0},
        {"load_timeout_s": -1.0},
        {"num_load_threads": 0},
        {"num_save_threads": 65},
        {"staging_bytes": 0},
        {"failure_limit": 0},
        {"cooldown_s": 0.0},
    ],
    ids=str,
)
def test_impossible_values_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        StoreSettings(**wrong)


def test_setting_carries_further_metadata():
    @attrs.frozen
    class Table:
        eviction: str = setting("lru", "Which.", component="eviction")
        password: str = setting("", "Secret.", secret=True)

    eviction, password = attrs.fields(Table)
    assert eviction.metadata["component"] == "eviction"
    assert password.metadata["secret"]
