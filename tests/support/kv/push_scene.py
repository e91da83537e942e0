"""An engine that has its prompts computed by others in the same process, which send their blocks along with the response."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from support.eventually import eventually
from support.kv.engine_pairs import Station, prompt_of
from trencadis.interfaces import ConnectorPair
from trencadis.records import FinishedSequence
from trencadis_testing.kv_watch import TransferBooks, watched

__all__ = [
    "BLOCK_BYTES",
    "NUM_BLOCKS",
    "PROMPT",
    "Decoder",
    "check_nothing_is_left",
    "decoder",
    "firsts_of",
    "port_of",
    "serve",
]

BLOCK_BYTES = 96
PROMPT = prompt_of(1, 41)
NUM_BLOCKS = 10
"""Full blocks of the prompt."""


class Decoder(Station):
    """An engine that lets engines at these ports compute its prompts.

    Attributes:
        books: What its connector was told of every transfer id.
    """

    books: TransferBooks

    def __init__(self, *ports: int, **config: Any) -> None:
        def watch(pair: ConnectorPair) -> ConnectorPair:
            pair, self.books = watched(pair)
            return pair

        names = tuple(f"127.0.0.1:{port}" for port in ports)
        super().__init__(
            prefill_engines=names, **{"min_remote_tokens": 8, "heartbeat_s": 60.0, "wrap": watch, **config}
        )


@contextlib.contextmanager
def decoder(*ports: int, **config: Any) -> Iterator[Decoder]:
    """Have a decoder for as long as the block runs; it knows all engines at the ports."""
    with Decoder(*ports, **config) as one:
        eventually(lambda: len(one.node.prefill_pool.ready()) == len(ports))
        yield one


def port_of(station: Station) -> int:
    port: int = station.node.server.port
    return port


def serve(one: Station, *others: Station, prompt: tuple[int, ...] = PROMPT) -> FinishedSequence:
    name = one.add(prompt, max_tokens=6)
    eventually(lambda: name in one.ends, of=(one, *others))
    return one.ends[name]


def firsts_of(one: Station) -> dict[str, int]:
    return dict(one.engine.stage("transfer").first_tokens.results)


def check_nothing_is_left(one: Decoder, *others: Station) -> None:
    """Wait until all engines are at rest, and check that no memory, block, transfer or hold is left."""
    eventually(lambda: one.node.pushes.num_bytes == 0, of=(one, *others))
    assert one.node.pushes._by_name == {}
    eventually(lambda: not one.engine.has_work, of=(one, *others))
    assert one.books.faults() == []
    eventually(lambda: not any(s.num_used_blocks for s in (one, *others)), of=(one, *others))
    for station in (one, *others):
        assert station.engine._state.blocks.num_used == 0
        assert station.node.holds.num_holds == 0
