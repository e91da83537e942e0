from __future__ import annotations

from typing import Any

import attrs
import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import ConfigValueError
from trencadis.interfaces import ComponentContext
from trencadis_kv.connectors.nixl.config import NixlConfig
from trencadis_kv.connectors.nixl.connector import make_nixl
from trencadis_kv.connectors.p2p.config import P2PConfig, check_hold
from trencadis_kv.connectors.p2p.connector import make_p2p


def test_nothing_is_reachable_from_elsewhere_by_default() -> None:
    config = P2PConfig()
    assert config.host == "127.0.0.1"
    assert config.peers == ()


def test_blocks_are_given_back_before_the_core_loses_patience() -> None:
    from trencadis.config.schema import CacheConfig

    assert P2PConfig().lease_s <= P2PConfig().max_hold_s < CacheConfig().release_timeout_s


@pytest.mark.parametrize(("max_hold_s", "is_fine"), [(59.9, True), (60.0, False), (61.0, False)])
def test_blocks_held_as_long_as_the_core_has_patience_are_an_error(max_hold_s: float, is_fine: bool) -> None:
    """A hold that lasts that long closes the connector, and with it every other."""
    context = ComponentContext(clock=SimulatedClock(), seed=0, quarantine_s=60.0)
    config = P2PConfig(max_hold_s=max_hold_s)
    if is_fine:
        check_hold(config, context, name="p2p")
        return
    with pytest.raises(
        ConfigValueError, match=rf"^\[kv_connector.other\] max_hold_s = {max_hold_s}: .*release_timeout_s = 60.0,"
    ):
        check_hold(config, context, name="other")


@pytest.mark.parametrize("secret", ["", "short"])
@pytest.mark.parametrize(("name", "make"), [("p2p", make_p2p), ("nixl", make_nixl)])
def test_without_a_secret_nothing_listens(name: str, make: Any, secret: str) -> None:
    context = ComponentContext(clock=SimulatedClock(), seed=0)
    config = {"p2p": P2PConfig, "nixl": NixlConfig}[name](secret=secret)
    with pytest.raises(ConfigValueError, match=rf"kv_connector.{name}\] secret .*any tenant.*openssl rand") as caught:
        make(config, context)
    assert "short" not in str(caught.value)


def test_secret_is_marked_as_one() -> None:
    assert attrs.fields_dict(P2PConfig)["secret"].metadata["secret"] is True


@pytest.mark.parametrize(
    "values",
    [
        {"port": -1},
        {"port": 65536},
        {"peers": ("10.0.0.0/33:7400",)},
        {"peers": ("not a network/8:7400",)},
        {"peers": ("10.0.0.0/8",)},
        {"peers": ("10.0.0.1",)},
        {"peers": ("[::1]",)},
        {"peers": ("localhost:0",)},
        {"peers": ("localhost:**",)},
        {"peers": ("fd00::5",)},
        {"peers": ("fd00::/8:7400",)},
        {"prefill_engines": ("::1:7400",)},
        {"peers": (":7400",)},
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
