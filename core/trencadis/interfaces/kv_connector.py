"""Contract of the noun ``kv_connector``: KV blocks in and out of this engine.

Two classes for two places: the scheduler side decides on the engine thread, the worker side moves bytes next to the
device. They speak through one bytes message a step, and the worker's report. A connector may be slow, wrong or dead; the only
allowed effects are a cache miss and a counter. A load parks its sequence: blocks are allocated but neither shared nor
hashed until the report says they are verified; a failed load is recomputed from the last valid token.

    lookup ─ Miss ▶ computed here
           ├ Pending ▶ asked again next step
           └ Hit(ticket, num_tokens) ▶ on_allocated ▶ parked ─ loaded ▶ runs
                                                             └ failed ▶ runs, recomputes
    finish ─ on_finished ─ None ▶ blocks freed
                         └ ticket ▶ blocks held until released
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import attrs

from trencadis.records import ConnectorReport, Request

__all__ = ["INTERFACE_VERSION", "ConnectorPair", "KVSchedulerSide", "KVWorkerSide", "Lookup"]

INTERFACE_VERSION = 1


@attrs.frozen(kw_only=True)
class Lookup:
    """The answer to a look-up.

    Attributes:
        num_tokens: Leading tokens, a multiple of the block size, whose KV can be loaded; 0 is a miss.
        ticket: Names the load in all later calls; unique for the life of the engine.
        pending: Ask again at the next step; ``num_tokens`` means nothing yet.
    """

    num_tokens: int = 0
    ticket: int = -1
    pending: bool = False


class KVSchedulerSide(ABC):
    """Decides what is loaded and saved. Engine thread; every call returns within 1 ms and never waits for I/O."""

    @abstractmethod
    def lookup(self, request: Request, *, block_hashes: Sequence[bytes], num_local_tokens: int) -> Lookup:
        """Say what can be loaded beyond the local prefix hit.

        Args:
            request: Whose prompt.
            block_hashes: Chained hashes of its full blocks, in order; the identity of their content.
            num_local_tokens: Tokens the local prefix cache has already.
        """

    @abstractmethod
    def on_allocated(self, ticket: int, *, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Take the blocks to load into: those behind the local hit, in order, with their hashes."""

    @abstractmethod
    def on_computed(self, *, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Be told of full blocks whose committed content may be saved. They may be reused any time after this step."""

    @abstractmethod
    def on_finished(self, request: Request, *, blocks: Sequence[int]) -> int | None:
        """Return a ticket that holds the blocks of a finished sequence until it is released, or None to free them."""

    @abstractmethod
    def on_cancelled(self, ticket: int) -> None:
        """Be told that a load is no longer wanted; its blocks stay held until the ticket is released."""

    @abstractmethod
    def take_message(self) -> bytes:
        """Return and forget what the worker side is to do with the next step; empty for nothing."""

    @abstractmethod
    def on_report(self, report: ConnectorReport) -> None:
        """Take the worker sides' merged report; once per step that has one."""


class KVWorkerSide(ABC):
    """Moves bytes. One per rank, on the backend's thread; transfers run on threads of its own."""

    @abstractmethod
    def register(self, kv_cache: Any) -> None:
        """Take the device's KV cache: the backend's own object, as its documentation describes."""

    @abstractmethod
    def begin_step(self, message: bytes) -> None:
        """Start what the scheduler side asked for; does not wait."""

    @abstractmethod
    def end_step(self) -> None:
        """Secure blocks to be saved before the next step may overwrite them; does not wait for a network."""

    @abstractmethod
    def poll(self) -> ConnectorReport:
        """Return what finished since the last call; does not wait."""

    @abstractmethod
    def close(self) -> None:
        """Stop transfers and give up connections; no block is touched afterwards."""


@attrs.frozen(kw_only=True)
class ConnectorPair:
    """What a kv_connector component's factory returns.

    Attributes:
        scheduler: Used by the engine.
        worker: Handed to the executor.
    """

    scheduler: KVSchedulerSide
    worker: KVWorkerSide
