from __future__ import annotations

import json
import socket
from typing import Any

import attrs
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from support.kv.p2p_ends import p2p_config
from trencadis.clock import SimulatedClock
from trencadis.errors import ConfigValueError, TransferError
from trencadis.interfaces import ComponentContext
from trencadis_kv.connectors.nixl.config import NixlConfig
from trencadis_kv.connectors.nixl.connector import make_nixl
from trencadis_kv.connectors.p2p.config import P2PConfig, check_hold
from trencadis_kv.connectors.p2p.connector import make_p2p
from trencadis_kv.connectors.p2p.metrics import P2PMetrics
from trencadis_kv.connectors.p2p.node import Node
from trencadis_kv.connectors.p2p.params import KeyCheck, RemotePrefix, handover_params, wants_hold
from trencadis_kv.connectors.p2p.peers import Peers
from trencadis_kv.connectors.p2p.remote_prefills import Holds
from trencadis_testing.fake_pool import FakeKVCache


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


PREFIX = RemotePrefix(
    engine="e", hold_id="t", host="127.0.0.1", port=5, num_tokens=32, lease_s=7.5, num_cached_tokens=16
)


GIVEN = handover_params(PREFIX, blocks=[3, 4])


def test_offer_has_the_names_that_vllm_gives_and_comes_back_as_it_was() -> None:
    assert GIVEN == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "e",
        "remote_request_id": "t",
        "remote_block_ids": [3, 4],
        "remote_host": "127.0.0.1",
        "remote_port": 5,
        "remote_num_tokens": 32,
        "remote_lease_s": 7.5,
        "remote_num_cached_tokens": 16,
        "tp_size": 1,
    }
    assert RemotePrefix.of(json.loads(json.dumps(GIVEN))) == PREFIX


def test_longest_prompt_fits_into_a_request() -> None:
    assert len(json.dumps(handover_params(PREFIX, blocks=range(1_000_000)))) < 65536


def test_misspelt_key_is_warned_of_once_and_foreign_ones_pass(caplog: pytest.LogCaptureFixture) -> None:
    keys = KeyCheck()
    for _ in range(2):
        keys.look_at({"do_remote_prefil": True, "remote_notify_port": 5, "remote_handshake_port": 6, "mine": 1})
    keys.look_at({**GIVEN, "Remote_host": "x"})
    keys.look_at(None)
    first, second = (one.getMessage() for one in caplog.records)
    assert (
        "the key 'do_remote_prefil', which has no effect. Did the client or router mean 'do_remote_prefill'?" in first
    )
    assert "'Remote_host'" in second


def test_made_up_keys_are_not_kept_without_end(caplog: pytest.LogCaptureFixture) -> None:
    keys = KeyCheck()
    keys.look_at({f"made up {i}": 1 for i in range(1000)})
    keys.look_at({"remote_hos": "x"})
    assert not caplog.records


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {**GIVEN, "do_remote_prefill": False},
        {**GIVEN, "do_remote_prefill": 1},
        {**GIVEN, "remote_engine_id": ""},
        {**GIVEN, "remote_request_id": 5},
        {**GIVEN, "remote_host": None},
        {**GIVEN, "remote_host": "x" * 300},
        {**GIVEN, "remote_port": 0},
        {**GIVEN, "remote_port": 65536},
        {**GIVEN, "remote_port": True},
        {**GIVEN, "remote_port": "5; rm"},
        {**GIVEN, "remote_num_tokens": "32"},
        {**GIVEN, "remote_num_tokens": -1},
        {**GIVEN, "remote_num_tokens": True},
    ],
)
def test_what_says_nowhere_is_nowhere(params: dict[str, Any] | None) -> None:
    assert RemotePrefix.of(params) is None


@pytest.mark.parametrize("value", [None, -1, "16", True, 2.5, [16]])
def test_engine_that_does_not_say_what_it_had_cached_had_nothing(value: Any) -> None:
    found = RemotePrefix.of({**GIVEN, "remote_num_cached_tokens": value})
    assert found == attrs.evolve(PREFIX, num_cached_tokens=0)


def test_port_may_be_text_and_a_missing_lease_is_the_usual_one() -> None:
    params = {**GIVEN, "remote_port": "5"}
    del params["remote_lease_s"]
    assert RemotePrefix.of(params) == attrs.evolve(PREFIX, lease_s=30.0)


@pytest.mark.parametrize(
    ("params", "wants"),
    [(None, False), ({}, False), ({"do_remote_decode": True}, True), ({"do_remote_decode": "yes"}, False)],
)
def test_only_who_asks_for_it_has_blocks_held(params: dict[str, Any] | None, wants: bool) -> None:
    assert wants_hold(params) is wants


@pytest.mark.slow
@settings(max_examples=100, phases=[Phase.explicit, Phase.generate])
@given(
    change=st.dictionaries(
        st.sampled_from(sorted(GIVEN)), st.none() | st.booleans() | st.integers() | st.floats() | st.text()
    )
)
def test_no_value_of_a_client_raises(change: dict[str, Any]) -> None:
    found = RemotePrefix.of({**GIVEN, **change})
    assert found is None or (0 < found.port < 65536 and found.num_tokens >= 0 and found.lease_s > 0)


def test_text_is_what_prometheus_reads_and_shows_what_there_is_now() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    clock = SimulatedClock()
    holds, peers = Holds(clock, lease_s=1, max_hold_s=1, max_bytes=100), Peers((), clock, retry_s=5)
    metrics = P2PMetrics(holds, peers)
    holds.add(1, "a", {}, num_bytes=64)
    holds.add(2, "b", {}, num_bytes=64)
    prefix = RemotePrefix(engine="e", hold_id="t", host="h", port=1, num_tokens=0, lease_s=1)
    peers.failed(prefix, TransferError("?", cause="unreachable"))
    metrics.looked_up("hit")
    metrics.failed("corrupt")
    metrics.moved("send", num_tokens=16, num_bytes=2**40 + 1)
    samples = {
        (sample.name, *sorted(value for value in sample.labels.values() if value != "p2p")): sample.value
        for family in text_string_to_metric_families(metrics.text())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    assert samples == {
        ("trencadis_kv_lookups_total", "hit"): 1,
        ("trencadis_kv_transfer_failures_total", "corrupt"): 1,
        ("trencadis_kv_tokens_total", "send"): 16,
        ("trencadis_kv_bytes_total", "send"): 2**40 + 1,
        ("trencadis_kv_holds_total", "refused"): 1,
        ("trencadis_kv_held_prefills",): 1,
        ("trencadis_kv_held_bytes",): 64,
        ("trencadis_kv_peers_down",): 1,
    }


def test_prompts_that_travel_are_counted_by_their_fate_and_shown_while_they_do() -> None:
    clock = SimulatedClock()
    holds = Holds(clock, lease_s=1.0, max_hold_s=1.0, max_bytes=1)
    metrics = P2PMetrics(holds, Peers((), clock, retry_s=1.0))
    metrics.watch_remote_prefills(lambda: 3)
    metrics.watch_delegated(lambda: 2)
    metrics.watch_engines(lambda: 1)
    metrics.count_delegated("served")
    metrics.count_delegated("served")
    assert metrics.value("delegated_prefills_total", result="served") == 2
    assert 'trencadis_kv_remote_prefills_running{connector="p2p"} 3.0' in metrics.text()
    assert 'trencadis_kv_delegated_prefills_running{connector="p2p"} 2.0' in metrics.text()
    assert 'trencadis_kv_prefill_engines{connector="p2p"} 1.0' in metrics.text()


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
