"""A prefill engine and a decode engine as processes of their own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from served_process import ServedProcess

FLAGS = (
    *("--model.path", "demo", "--engine.warmup", "false", "--cache.num-blocks", "256", "--cache.block-size", "16"),
    *("--kv-connector.name", "p2p"),
)


@pytest.fixture(scope="session")
def prefill_flags() -> tuple[str, ...]:
    return (*FLAGS, "--kv-connector.p2p.lease-s", "4")


@pytest.fixture(scope="session")
def engines(prefill_flags: tuple[str, ...]) -> Iterator[tuple[ServedProcess, ServedProcess]]:
    """Prefill and decode; they start side by side, and serve all tests that harm nobody. Blocks go over TCP, where faults can be put."""
    own = ("--kv-connector.p2p.pull-timeout-s", "2", "--kv-connector.p2p.retry-s", "0")
    both = (
        ServedProcess(*prefill_flags),
        ServedProcess(*FLAGS, *own, "--kv-connector.p2p.shared-memory", "false"),
    )
    try:
        for engine in both:
            engine.wait()
        yield both
    finally:
        for engine in both:
            engine.close()


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
