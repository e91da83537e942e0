"""A prefill engine and a decode engine as processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.kv.p2p_ends import LOOPBACK_PEERS, SECRET
from support.server.served_process import ServedProcess

FLAGS = (
    *("--model.path", "demo", "--engine.warmup", "false", "--cache.num-blocks", "256", "--cache.block-size", "16"),
    *("--kv-connector.name", "p2p", "--kv-connector.p2p.secret", SECRET),
    *("--kv-connector.p2p.peers", ",".join(LOOPBACK_PEERS)),
)


PREFILL = (*FLAGS, "--kv-connector.p2p.lease-s", "4")
# Blocks go over TCP, where faults can be put.
DECODE = (*FLAGS, "--kv-connector.p2p.pull-timeout-s", "2", "--kv-connector.p2p.retry-s", "0")
DECODE += ("--kv-connector.p2p.shared-memory", "false")


class Pair:
    """A prefill engine and a decode engine, which start side by side and serve all tests."""

    def __init__(self) -> None:
        self._prefill, self._decode = ServedProcess(*PREFILL), ServedProcess(*DECODE)

    def serving(self) -> tuple[ServedProcess, ServedProcess]:
        """Return both as soon as they serve; another prefill engine where a test has killed the last one."""
        if self._prefill.process.poll() is not None and self._prefill.url:
            self._prefill.close()
            self._prefill = ServedProcess(*PREFILL)
        for engine in (self._prefill, self._decode):
            if not engine.url:
                engine.wait()
        return self._prefill, self._decode

    def close(self) -> None:
        for engine in (self._prefill, self._decode):
            engine.close()


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    pair = Pair()
    try:
        yield pair
    finally:
        pair.close()


@pytest.fixture
def engines(pair: Pair) -> tuple[ServedProcess, ServedProcess]:
    """Prefill and decode. A test may kill the first, which takes a while to replace."""
    return pair.serving()


@pytest.fixture
def prefilled(engines: tuple[ServedProcess, ServedProcess]) -> Any:
    """Has a prompt computed at the prefill engine; returns what the decode engine is to be told."""

    def prefill(prompt: list[int], **body: Any) -> dict[str, Any]:
        answer = engines[0].post(
            prompt=prompt,
            **{"max_tokens": 1, "temperature": 0, **body},
            kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False},
        )
        params: dict[str, Any] = answer.json()["kv_transfer_params"]
        return params

    return prefill
