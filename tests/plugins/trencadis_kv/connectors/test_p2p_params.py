from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from trencadis_kv.connectors.p2p.params import KeyCheck, RemotePrefix, handover_params, wants_hold

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
