from __future__ import annotations

import socket

import pytest

from support.kv.p2p_ends import p2p_config
from trencadis.clock import SimulatedClock
from trencadis.errors import ConfigValueError
from trencadis_kv.connectors.p2p.node import Node
from trencadis_testing.fake_pool import FakeKVCache

LAYOUT = FakeKVCache([], block_size=4).layout


def test_every_start_is_another_engine_with_the_same_blocks() -> None:
    nodes = [Node(p2p_config(), clock=SimulatedClock(), model="m") for _ in range(2)]
    for node in nodes:
        node.start(LAYOUT)
    one, other = (node.identity for node in nodes)
    assert one is not None
    assert other is not None
    assert one.engine != other.engine
    assert one.compat == other.compat
    assert nodes[0].address == ("127.0.0.1", nodes[0].server.port)
    for node in nodes:
        node.close()
        node.close()


def test_other_model_and_other_numerics_are_other_blocks() -> None:
    compats = []
    for model, numerics in (("m", "exact"), ("n", "exact"), ("m", "any")):
        node = Node(p2p_config(numerics=numerics), clock=SimulatedClock(), model=model)
        node.start(LAYOUT)
        assert node.identity is not None
        compats.append(node.identity.compat)
        node.close()
    assert len(set(compats)) == 3


def test_advertised_host_is_what_others_are_told() -> None:
    node = Node(p2p_config(advertised_host="node-1.example"), clock=SimulatedClock(), model="m")
    node.start(LAYOUT)
    assert node.address == ("node-1.example", node.server.port)
    node.close()


def test_port_in_use_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        node = Node(p2p_config(port=port), clock=SimulatedClock(), model="m")
        with pytest.raises(ConfigValueError, match=f"port {port}.*in use.*kv_connector.p2p.port"):
            node.start(LAYOUT)
        node.close()


def test_address_of_another_machine_is_an_error_that_names_it() -> None:
    node = Node(p2p_config(host="192.0.2.1"), clock=SimulatedClock(), model="m")
    with pytest.raises(ConfigValueError, match=r"192\.0\.2\.1"):
        node.start(LAYOUT)
