from __future__ import annotations

import attrs
import pytest

from trencadis_kv.connectors.host_offload.config import HostOffloadConfig


def test_eviction_names_a_component():
    assert attrs.fields_dict(HostOffloadConfig)["eviction"].metadata["component"] == "eviction"


def test_settings_of_every_store_are_there_as_well():
    assert HostOffloadConfig(namespace="blue", capacity_bytes=5).namespace == "blue"


def test_memory_of_nothing_is_refused():
    with pytest.raises(ValueError, match="capacity_bytes"):
        HostOffloadConfig(capacity_bytes=0)
