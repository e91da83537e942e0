"""An engine of this process goes on where an engine of another process ended; the blocks come through memory that both see."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from support.kv.p2p_ends import LOOPBACK_PEERS, SECRET
from support.server.served_process import ServedProcess
from trencadis.client.factory import configure
from trencadis.engine.build import build_engine
from trencadis.records import FinishedSequence, Request, SamplingParams
from trencadis_kv.connectors.p2p.transport import shared_memory

PROMPT = [5 + (i * 37 + i * i % 11) % 200 for i in range(200)]

pytestmark = pytest.mark.skipif(
    shared_memory(1) is None, reason="this system has no memory that processes can lend each other"
)


@pytest.fixture
def engine() -> Iterator[Any]:
    tables = {
        "observer": {"names": []},
        "cache": {"num_blocks": 256, "block_size": 16},
        "kv_connector": {"name": "p2p", "p2p": {"secret": SECRET, "peers": list(LOOPBACK_PEERS)}},
    }
    config, registry = configure("demo", config_file=None, tables=tables)
    one = build_engine(config, registry=registry)
    yield one
    one.close()


def served(engine: Any, name: str, **more: Any) -> FinishedSequence:
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    engine.add(Request(request_id=name, prompt_token_ids=tuple(PROMPT), params=params, **more))
    while True:
        for end in engine.step().finished:
            assert isinstance(end, FinishedSequence)
            return end
        threading.Event().wait(0.001)


def pulled_bytes(engine: Any) -> dict[str, float]:
    text: str = engine.stage("transfer").transfers.connector.strategy.metrics()
    found = re.findall(r'trencadis_kv_pulled_bytes_total{connector="p2p",way="([^"]+)"} (\S+)', text)
    return {way: float(num_bytes) for way, num_bytes in found}


def test_blocks_of_another_process_come_through_shared_memory(
    engine: Any, engines: tuple[ServedProcess, ServedProcess]
) -> None:
    prefill = engines[0]
    answer = prefill.post(prompt=PROMPT, max_tokens=1, kv_transfer_params={"do_remote_decode": True}).json()
    pulled = served(engine, "pulled", transfer_params=answer["kv_transfer_params"])
    assert pulled.num_cached_tokens == 0, "it was not cached before"
    assert pulled_bytes(engine) == {"shared memory": 192 // 16 * 80 * 1024, "connection": 0.0}
    alone = served(engine, "alone", cache_salt="alone")
    assert alone.num_cached_tokens == 0
    assert pulled.token_ids.tolist() == alone.token_ids.tolist()
