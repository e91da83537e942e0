"""Messages between client and worker process, in msgpack: numbers and text; long arrays are little-endian bytes.

A received message is one of these types, or an error; nothing in it is executed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from trencadis.errors import InvalidRequestError
from trencadis.records.plain import plain_fault
from trencadis.startup import LedgerEntry

__all__ = [
    "AddMessage",
    "AnswerMessage",
    "ControlMessage",
    "GetMetricsMessage",
    "ClientMessage",
    "CloseMessage",
    "DropMessage",
    "EmbedMessage",
    "EmbeddingPart",
    "EndMessage",
    "FailedMessage",
    "Fault",
    "FinishedPart",
    "HASH_BYTES",
    "WorkerMessage",
    "LoadMessage",
    "LogprobsPart",
    "MetricsMessage",
    "ReadyMessage",
    "RefusedMessage",
    "StartMessage",
    "StayedMessage",
    "StepMessage",
    "WithdrawMessage",
    "decode_client_message",
    "decode_worker_message",
    "decode_start",
    "encode",
    "worker_message_decoder",
]


class Part(msgspec.Struct, array_like=True, gc=False):
    """A part of a message."""


class Message(msgspec.Struct, array_like=True, gc=False, tag=True):
    """A whole message; its tag is the name of its class."""


class Fault(Part):
    """A ``TrencadisError``: the name of its class, its whole message, its hint, the field at fault and when to try again, if it knows."""

    kind: str
    message: str
    hint: str
    field: str = ""
    retry_after_s: float = 1.0


# ------------------------------------------------------------------------------------------------- client to worker


class StartMessage(Message):
    """Configuration of the worker process; sent through its standard input, as it holds secrets.

    Attributes:
        address: Of the socket.
        tables: The configuration.
        sources: Source of each value, for messages.
        log_levels: Levels of the logger ``trencadis``, while the engine loads and afterwards.
        python_path: ``PYTHONPATH`` as it was, or None.
        activity_file: Shared memory for the engine's activity, see :mod:`trencadis.activity`; -1: none.
        sends_load: Send ``LoadMessage``s.
    """

    address: str
    tables: dict[str, Any]
    sources: dict[str, str]
    log_levels: tuple[str, str]
    python_path: str | None
    activity_file: int = -1
    sends_load: bool = False


class AddMessage(Message):
    """A request. ``handle`` is its number on both sides; ``params`` and ``terms`` hold the values that differ from the defaults.

    ``output_token_ids``: of a request that another engine accepted and did not end; None: it is new.
    """

    handle: int
    request_id: str
    prompt_token_ids: bytes
    params: dict[str, Any]
    terms: dict[str, Any]
    output_token_ids: bytes | None = None
    end_token_ids: tuple[int, ...] = ()


class EndMessage(Message):
    """End a request, if it has not ended: because its text is complete, or because it was aborted."""

    handle: int
    is_complete: bool


class WithdrawMessage(Message):
    """End a request, if it has not ended, that another engine goes on with; or answer by a ``StayedMessage``."""

    handle: int


class EmbedMessage(Message):
    """A text to embed."""

    request_id: str
    token_ids: bytes


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
    """The engine takes requests; ``model`` holds the fields of ``ModelFacts``, ``hashing`` is as of the engine, ``start`` its ledger."""

    model: dict[str, Any]
    max_model_len: int
    plan_hash: str
    hashing: tuple[str, int] | None = None
    start: tuple[LedgerEntry, ...] = ()


class FailedMessage(Message):
    """The engine could not be built, or failed beyond repair; the process ends."""

    fault: Fault


class RefusedMessage(Message):
    """A request or a text that the engine refused."""

    request_id: str
    fault: Fault


class StayedMessage(Message):
    """A request that was to be withdrawn and cannot go on elsewhere, or has ended."""

    request_id: str


class FinishedPart(Part):
    """A ``FinishedSequence``, its slot replaced by the handle; ``transfer_params`` is JSON."""

    request_id: str
    handle: int
    token_ids: bytes
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    finish_s: float
    error: str
    stop_token_id: int | None
    transfer_params: bytes = b""
    num_approximate_tokens: int = 0


class LogprobsPart(Part):
    """A ``TokenLogprobs``."""

    index: int
    position: int
    token_id: int
    logprob: float
    rank: int
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class EmbeddingPart(Part):
    """An ``Embedding``; the vector as float32."""

    request_id: str
    vector: bytes
    num_tokens: int
    error: str


class StepMessage(Message):
    """The ``TokenDeltas`` of one step, slots replaced by handles."""

    handles: list[int]
    num_tokens: list[int]
    token_ids: list[int]
    finished: tuple[FinishedPart, ...] = ()
    logprobs: tuple[LogprobsPart, ...] = ()
    prompt_logprobs: tuple[LogprobsPart, ...] = ()
    embeddings: tuple[EmbeddingPart, ...] = ()


class MetricsMessage(Message):
    """Metrics of the observers, in Prometheus' text format."""

    text: str


class AnswerMessage(Message):
    """The answer to a ``ControlMessage``, in their order. ``fault``: the error instead."""

    table: dict[str, Any]
    fault: Fault | None = None


class LoadMessage(Message):
    """An ``EngineLoad``; hashes are cut to ``HASH_BYTES`` and joined."""

    num_waiting: int
    num_running: int
    kv_usage: float
    added: bytes
    removed: bytes


HASH_BYTES = 8
"""Of a block hash in a ``LoadMessage``: enough to route by, as two that are equal cost time at most."""

WorkerMessage: TypeAlias = (
    ReadyMessage
    | FailedMessage
    | RefusedMessage
    | StayedMessage
    | StepMessage
    | MetricsMessage
    | AnswerMessage
    | LoadMessage
)


def encode(message: Message) -> bytes:
    """Return a message as bytes. Pure.

    Raises:
        InvalidRequestError: A value cannot be encoded, such as a whole number beyond 64 bits. It belongs to the request, or the
            answer, whose message this is; ``field`` names it.
    """
    try:
        return _encoder().encode(message)
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        raise _refusal(message, error) from None


def _refusal(message: Message, error: Exception) -> InvalidRequestError:
    """Return the error for a message that cannot be encoded, with the place of the value at fault."""
    for name in message.__struct_fields__:
        value = getattr(message, name)
        # Sampling parameters, terms and an operator's arguments are known by their own names.
        tables = value.items() if name in ("params", "terms", "arguments") else [(name, value)]
        for field, one in tables:
            fault = plain_fault(one)
            if fault is not None:
                where, why = fault
                return InvalidRequestError(f"{field}{where} {why}.", field=field)
    return InvalidRequestError(f"a value cannot be sent to the other process: {error}.")


def _plain_number(value: Any) -> Any:
    """Return a number of NumPy, or of a class derived from a plain one, as a plain number.

    Raises:
        TypeError: It is none.
    """
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if type(value).__module__ == "numpy" and hasattr(value, "item") and not getattr(value, "ndim", 0):
        return value.item()
    raise TypeError(f"a value of type {type(value).__name__} cannot be encoded")


def decode_start(data: bytes) -> StartMessage:
    """Decode the first message. Pure.

    Raises:
        msgspec.DecodeError: It is no such message; also the others.
    """
    return _start_decoder().decode(data)


def decode_client_message(data: bytes) -> ClientMessage:
    """Decode a message of the client. Pure."""
    message: ClientMessage = _client_decoder().decode(data)
    return message


def decode_worker_message(data: bytes) -> WorkerMessage:
    """Decode a message of the worker. Pure."""
    return worker_message_decoder()(data)


def worker_message_decoder() -> Callable[[bytes], WorkerMessage]:
    """Return :func:`decode_worker_message` without a function around it, for every step."""
    decode: Callable[[bytes], WorkerMessage] = _worker_decoder().decode
    return decode


@functools.cache
def _encoder() -> msgspec.msgpack.Encoder:
    return msgspec.msgpack.Encoder(enc_hook=_plain_number)


@functools.cache
def _start_decoder() -> msgspec.msgpack.Decoder[StartMessage]:
    return msgspec.msgpack.Decoder(StartMessage)


@functools.cache
def _client_decoder() -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(ClientMessage)


@functools.cache
def _worker_decoder() -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(WorkerMessage)
