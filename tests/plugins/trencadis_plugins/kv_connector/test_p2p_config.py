from __future__ import annotations

from typing import Any

import attrs
import pytest

from trencadis_plugins.kv_connector.p2p_config import P2PConfig


def test_nothing_is_reachable_from_elsewhere_by_default() -> None:
    config = P2PConfig()
    assert config.host == "127.0.0.1"
    assert config.peers == ("127.0.0.0/8", "::1/128", "localhost")


def test_blocks_are_given_back_before_the_core_loses_patience() -> None:
    from trencadis.config.schema import CacheConfig

    assert P2PConfig().lease_s <= P2PConfig().max_hold_s < CacheConfig().quarantine_s


def test_secret_is_marked_as_one() -> None:
    assert attrs.fields_dict(P2PConfig)["secret"].metadata["secret"] is True


@pytest.mark.parametrize(
    "values",
    [
        {"port": -1},
        {"port": 65536},
        {"peers": ("10.0.0.0/33",)},
        {"peers": ("not a network/8",)},
        {"lease_s": 0.0},
        {"numerics": "near"},
        {"num_pull_threads": 0},
        {"max_connections": 0},
    ],
    ids=str,
)
def test_impossible_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        P2PConfig(**values)
