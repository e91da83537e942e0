"""Messages between client and worker process: control messages around records, which travel as they are.

A received message is one of these types, or an error; nothing in it is executed. How they become bytes: :mod:`trencadis_remote.process.wire`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from trencadis.client.engine_client import StepOutputs
from trencadis.errors import TrencadisError
from trencadis.records import EmbeddingRequest, EngineLoad, ModelFacts
from trencadis.startup import LedgerEntry

__all__ = [
    "HASH_BYTES",
    "AddMessage",
    "AnswerMessage",
    "ClientMessage",
    "CloseMessage",
    "ControlMessage",
    "DropMessage",
    "EmbedMessage",
    "EndMessage",
    "FailedMessage",
    "GetMetricsMessage",
    "LoadMessage",
    "MetricsMessage",
    "ReadyMessage",
    "StartMessage",
    "StayedMessage",
    "WithdrawMessage",
    "WorkerMessage",
]


class Message(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    """A whole message; its tag is the name of its class."""


# ------------------------------------------------------------------------------------------------- client to worker


class StartMessage(Message):
    """Configuration of the worker process; sent first, and through the channel, as it holds secrets.

    Attributes:
        tables: The configuration.
        sources: Source of each value, for messages.
        log_levels: Levels of the logger ``trencadis``, while the engine loads and afterwards.
        python_path: ``PYTHONPATH`` as it was, or None.
        activity_file: Shared memory for the engine's activity, see :mod:`trencadis.activity`; -1: none.
        sends_load: Send ``LoadMessage``s.
    """

    tables: dict[str, Any]
    sources: dict[str, str]
    log_levels: tuple[str, str]
    python_path: str | None
    activity_file: int = -1
    sends_load: bool = False


class AddMessage(Message):
    """A ``Request``, read by :func:`~trencadis_remote.process.wire.decode_request`: one that is impossible is refused alone.

    ``handle`` is its number on both sides.
    """

    handle: int
    request_id: str
    request: msgspec.Raw


class EndMessage(Message):
    """End a request, if it has not ended: because its text is complete, or because it was aborted."""

    handle: int
    is_complete: bool


class WithdrawMessage(Message):
    """End a request, if it has not ended, that another engine goes on with; or answer by a ``StayedMessage``."""

    handle: int


class EmbedMessage(Message):
    """A text to embed."""

    request: EmbeddingRequest


class DropMessage(Message):
    """Drop a text that waits to be embedded."""

    request_id: str


class GetMetricsMessage(Message):
    """Request a ``MetricsMessage``."""


class ControlMessage(Message):
    """A control request; its answer is an ``AnswerMessage``."""

    name: str
    arguments: dict[str, Any]


class CloseMessage(Message):
    """End."""


ClientMessage: TypeAlias = (
    AddMessage
    | EndMessage
    | WithdrawMessage
    | EmbedMessage
    | DropMessage
    | GetMetricsMessage
    | ControlMessage
    | CloseMessage
)

# ------------------------------------------------------------------------------------------------- worker to client


class ReadyMessage(Message):
    """The engine takes requests; ``hashing`` is the engine's, ``start`` its ledger."""

    model: ModelFacts
    max_model_len: int
    plan_hash: str
    hashing: tuple[str, int] | None = None
    start: tuple[LedgerEntry, ...] = ()


class FailedMessage(Message):
    """The engine could not be built, or failed beyond repair; the process ends."""

    error: TrencadisError


class StayedMessage(Message):
    """A request that was to be withdrawn and cannot go on elsewhere, or has ended."""

    request_id: str


class MetricsMessage(Message):
    """Metrics of the observers, in Prometheus' text format."""

    text: str


class AnswerMessage(Message):
    """The answer to a ``ControlMessage``, in their order. ``error``: instead of the answer."""

    table: dict[str, Any]
    error: TrencadisError | None = None


class LoadMessage(Message):
    """The engine's load; hashes are cut to ``HASH_BYTES``."""

    load: EngineLoad


HASH_BYTES = 8
"""Bytes of a block hash in a ``LoadMessage``: enough to route by, as two that are equal cost time at most."""

WorkerMessage: TypeAlias = (
    ReadyMessage | FailedMessage | StayedMessage | StepOutputs | MetricsMessage | AnswerMessage | LoadMessage
)
"""``StepOutputs``: the outputs of one step, with handles as slots, or requests and texts that the engine refused."""
