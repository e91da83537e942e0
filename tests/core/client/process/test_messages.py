from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest

from trencadis.client.process.conversion import step_message, step_outputs
from trencadis.client.process.messages import (
    AddMessage,
    MetricsMessage,
    StartMessage,
    decode_client_message,
    decode_start,
    decode_worker_message,
    encode,
)
from trencadis.records import TokenDeltas


def test_what_is_no_message_is_refused() -> None:
    alive = encode(MetricsMessage(text="a"))
    assert decode_worker_message(alive) == MetricsMessage(text="a")
    for data in (b"", b"\x80", alive[:-1], b"cos\nsystem\n(S'true'\ntR."):
        with pytest.raises(msgspec.DecodeError):
            decode_worker_message(data)
    with pytest.raises(msgspec.DecodeError):
        decode_client_message(alive)  # a message of the other side


def test_fields_of_another_type_are_refused() -> None:
    data = msgspec.msgpack.encode(["AddMessage", "no number", "a", b"", {}, {}])
    with pytest.raises(msgspec.ValidationError):
        decode_client_message(data)


def test_token_ids_may_be_whole_keys_of_a_table() -> None:
    message = AddMessage(handle=0, request_id="a", prompt_token_ids=b"", params={"logit_bias": {5: 1.0}}, terms={})
    assert decode_client_message(encode(message)) == message


def test_the_tables_of_a_configuration_arrive() -> None:
    start = StartMessage(
        address="ipc:///x", tables={"engine": {"seed": 3, "names": ["a"]}}, sources={"engine.seed": "flag"},
        log_levels=("info", "info"), python_path=None,
    )  # fmt: skip
    assert decode_start(encode(start)) == start


def test_a_step_of_32_sequences_costs_a_tenth_of_a_millisecond_at_most() -> None:
    deltas = TokenDeltas(
        slots=np.arange(32, dtype=np.int32),
        num_tokens=np.ones(32, np.int32),
        token_ids=np.arange(32, dtype=np.int32),
    )
    handles = np.arange(256, dtype=np.int32)
    times = []
    for _ in range(200):
        start_s = time.thread_time()
        step_outputs(decode_worker_message(encode(step_message(deltas, handles, ()))))  # type: ignore[arg-type]
        times.append(time.thread_time() - start_s)
    assert min(times) < 100e-6
