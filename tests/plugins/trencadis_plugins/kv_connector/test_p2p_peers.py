from __future__ import annotations

import logging

import attrs
import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import TransferError
from trencadis_plugins.kv_connector.p2p_params import RemotePrefix
from trencadis_plugins.kv_connector.p2p_peers import Peers

PREFIX = RemotePrefix(engine="e", ticket="t", host="10.0.0.1", port=5, num_tokens=32, lease_s=7.5)


def peers_of(clock: SimulatedClock | None = None) -> Peers:
    return Peers(("10.0.0.0/8", "fd00::/8", "node-1.example"), clock or SimulatedClock(), retry_s=5.0)


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        ("10.1.2.3", True),
        ("11.1.2.3", False),
        ("fd00::5", True),
        ("fe00::5", False),
        ("node-1.example", True),
        ("NODE-1.example", True),
        ("node-2.example", False),
        ("10.0.0.1.evil.example", False),
        ("127.0.0.1", False),
        ("", False),
    ],
)
def test_only_named_hosts_are_pulled_from(host: str, is_allowed: bool) -> None:
    assert peers_of().allows(host) is is_allowed


def test_stranger_is_mentioned_once_and_cannot_write_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    peers = peers_of()
    for _ in range(3):
        peers.allows("evil\nINFO all is well")
    (record,) = caplog.records
    assert "\n" not in record.getMessage()


def test_memory_of_strangers_is_bounded() -> None:
    peers = peers_of()
    logging.disable()
    try:
        for number in range(3000):
            peers.allows(f"host-{number}")
    finally:
        logging.disable(logging.NOTSET)
    assert len(peers._strangers) == 1024


@pytest.mark.parametrize("cause", ["unreachable", "deadline"])
def test_engine_that_cannot_be_reached_is_left_alone_for_a_while(cause: str) -> None:
    clock = SimulatedClock()
    peers = peers_of(clock)
    peers.failed(PREFIX, TransferError("gone", cause=cause))
    assert peers.is_down(PREFIX)
    assert peers.num_down == 1
    assert not peers.is_down(attrs.evolve(PREFIX, engine="its successor on the same port"))
    clock.advance(5.1)
    assert not peers.is_down(PREFIX)


def test_engine_of_another_kind_is_left_alone_for_good_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = SimulatedClock()
    peers = peers_of(clock)
    for _ in range(2):
        peers.failed(PREFIX, TransferError("another model", cause="incompatible"))
    clock.advance(1e6)
    assert peers.is_down(PREFIX)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("cause", ["lost", "corrupt", "cancelled", "raised"])
def test_other_failures_say_nothing_about_the_engine(cause: str) -> None:
    peers = peers_of()
    peers.failed(PREFIX, TransferError("?", cause=cause))
    assert not peers.is_down(PREFIX)
