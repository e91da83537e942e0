"""What a flight record holds, and its file: the last steps of an engine, from which the same schedule can be made again.

    TRENCADIS-FLIGHT 1, a line of text ▶ zlib( msgpack( FlightRecord ) )

Nothing in it is text or a token id. Of two requests it says only how many first tokens they have in common, which is all that a prefix
cache depends on.
"""

from __future__ import annotations

import zlib
from typing import Any

import msgspec
import numpy as np

from trencadis.errors import ConfigError
from trencadis.records.arrays import Int32Array

__all__ = [
    "FLIGHT_RECORD_VERSION",
    "RecordedEvent",
    "FlightRecord",
    "RecordedArrival",
    "RecordedAttempt",
    "RecordedCommit",
    "RecordedEnd",
    "RecordedFailure",
    "RecordedRequest",
    "decode_flight_record",
    "encode_flight_record",
    "int32s",
]

FLIGHT_RECORD_VERSION = 1
_MAGIC = b"TRENCADIS-FLIGHT "
_MAX_BYTES = 2**31
_ARRAY = 1
"""Extension type of msgpack: a numpy array, as its type, a space, and its bytes."""


class RecordedRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request that was in the engine while steps were recorded.

    Attributes:
        number: 0, 1, ...; by which events name it.
        request_id: As the client or the door named it.
        slot: Its slot in the engine.
        arrival_s: Engine clock.
        num_prompt_tokens: Of the prompt.
        num_known_tokens: When it was added: more than the prompt if another engine began it.
        num_tokens: Known at the end of the record, or when it ended.
        like: Another request, which begins like it.
        num_like: So many first tokens are those of ``like``; the next one differs. 0: none are.
        max_tokens: Asked for; None: what fits.
        min_tokens: The same.
        wants_prompt_logprobs: Its prompt is computed, whatever is cached.
        tenant: See ``RequestTerms``.
        cache_salt: A name for it, equal where the salt was; None: the tenant.
        adapter: See ``RequestTerms``.
        priority: The same, without the tenant's.
        weight: The same.
        ttft_target_s: The same.
        tpot_target_s: The same.
        finish_reason: Why it ended; empty: it had not.
        ends_by_token: It ended with a stop token.
        finish_s: When; 0: it had not ended.
        first_token_s: When its first token came; 0: none had.
        num_cached_tokens: Prompt tokens that came from the prefix cache.
        num_preemptions: How often it lost its blocks.
    """

    number: int
    request_id: str
    slot: int
    arrival_s: float
    num_prompt_tokens: int
    num_known_tokens: int
    num_tokens: int
    like: int = -1
    num_like: int = 0
    max_tokens: int | None = None
    min_tokens: int = 0
    wants_prompt_logprobs: bool = False
    tenant: str = ""
    cache_salt: str | None = None
    adapter: str = ""
    priority: int = 0
    weight: float | None = None
    ttft_target_s: float = float("inf")
    tpot_target_s: float = float("inf")
    finish_reason: str = ""
    ends_by_token: bool = False
    finish_s: float = 0.0
    first_token_s: float = 0.0
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far."""
        return self.num_tokens - self.num_prompt_tokens


class RecordedArrival(msgspec.Struct, array_like=True, tag="arrival", frozen=True):
    """A request was added."""

    now_s: float
    number: int


class RecordedEnd(msgspec.Struct, array_like=True, tag="end", frozen=True):
    """A client gave a request up, or found its text complete.

    Attributes:
        now_s: Engine clock.
        number: Of the request.
        is_complete: A stop string was found.
    """

    now_s: float
    number: int
    is_complete: bool


class RecordedAttempt(msgspec.Struct, array_like=True, tag="plan", frozen=True):
    """The scheduler was asked for a plan.

    Attributes:
        now_s: Engine clock.
        is_plan: Whether there was one.
        step: Its number.
        slots: Who is in it, as the bytes of int32.
        starts: Computed tokens of each before.
        counts: Tokens of each, drafts included.
        num_drafts: Drafts of each; empty: there were none.
        admitted: Slots that were admitted.
        preempted: Slots that lost their blocks.
        num_waiting: Sequences that waited before.
        num_free_blocks: Blocks that could be had before.
        policy: Name of the policy.
    """

    now_s: float
    is_plan: bool
    step: int
    slots: bytes
    starts: bytes
    counts: bytes
    num_drafts: bytes
    admitted: tuple[int, ...]
    preempted: tuple[int, ...]
    num_waiting: int
    num_free_blocks: int
    policy: str

    @property
    def schedule(self) -> tuple[object, ...]:
        """Everything that a replay has to meet: all but the time."""
        return (
            *(self.is_plan, self.step, self.slots, self.starts, self.counts, self.num_drafts),
            *(self.admitted, self.preempted, self.num_waiting, self.num_free_blocks),
        )


class RecordedCommit(msgspec.Struct, array_like=True, tag="commit", frozen=True):
    """The oldest step in flight was committed.

    Attributes:
        wait_s: Engine clock when the engine began to wait for it.
        now_s: When its output was there.
        end_s: When it was committed.
        plan_s: How long its plan and batch took, seconds.
        device_s: How long the device computed, seconds.
        num_emitted: Tokens of each sequence of the plan, as the bytes of int32; empty: one of each that was to get one.
        errors: Places in the plan whose sequence got an error instead.
    """

    wait_s: float
    now_s: float
    end_s: float
    plan_s: float
    device_s: float
    num_emitted: bytes
    errors: tuple[int, ...]


class RecordedFailure(msgspec.Struct, array_like=True, tag="failure", frozen=True):
    """The oldest step in flight failed, or the newest plan could not be submitted.

    Attributes:
        now_s: Engine clock.
        step: Its number.
        error: Type of the error.
        was_submitted: It ran.
    """

    now_s: float
    step: int
    error: str
    was_submitted: bool


RecordedEvent = RecordedArrival | RecordedEnd | RecordedAttempt | RecordedCommit | RecordedFailure


class FlightRecord(msgspec.Struct, kw_only=True):
    """The last steps of one engine.

    Attributes:
        reason: Why it was written: ``request``, ``fault``, ``stall``.
        cause: In words.
        written_at: Seconds since 1970.
        version: Of Trencadís.
        plan_hash: Of the plugins, versions and options.
        components: By noun: name, distribution and version of what was in force.
        config: Tables of the core, without secrets and texts.
        model: Facts of the model.
        capabilities: Of the backend.
        num_blocks: KV blocks of the engine.
        block_size: Tokens per block.
        max_model_len: Tokens.
        num_in_flight: Steps that may be in flight at once.
        max_draft_tokens: Drafts of a sequence in a step; 0 without speculation.
        frame: The engine's state before the first event; None: it had just been built.
        obstacles: Why the record cannot be replayed exactly, in words; empty: it can.
        requests: By number.
        events: In order.
    """

    reason: str
    cause: str
    written_at: float
    version: str
    plan_hash: str
    components: dict[str, tuple[str, str, str]]
    config: dict[str, Any]
    model: dict[str, Any]
    capabilities: dict[str, Any]
    num_blocks: int
    block_size: int
    max_model_len: int
    num_in_flight: int
    max_draft_tokens: int
    frame: dict[str, Any] | None
    obstacles: list[str]
    requests: list[RecordedRequest]
    events: list[RecordedEvent]

    @property
    def num_steps(self) -> int:
        """Plans in it."""
        return sum(isinstance(event, RecordedAttempt) and event.is_plan for event in self.events)


def encode_flight_record(record: FlightRecord) -> bytes:
    """Return the file of a record. Pure."""
    data = msgspec.msgpack.encode(record, enc_hook=_encode)
    return _MAGIC + b"%d\n" % FLIGHT_RECORD_VERSION + zlib.compress(data, 1)


def decode_flight_record(data: bytes, *, name: str = "the file") -> FlightRecord:
    """Return the record of a file. Pure.

    Args:
        data: The file.
        name: Of the file, for messages.

    Raises:
        ConfigError: It is none, is damaged, or of a version that is not read here.
    """
    head, _, body = data.partition(b"\n")
    version = head.removeprefix(_MAGIC)
    if not head.startswith(_MAGIC) or not version.isdigit():
        raise ConfigError(f"{name} is no flight record.", hint="Name a file that an engine wrote: *.flight.")
    if int(version) != FLIGHT_RECORD_VERSION:
        raise ConfigError(
            f"{name} is a flight record of version {int(version)}; this Trencadís reads version {FLIGHT_RECORD_VERSION}.",
            hint="Replay it with the version of Trencadís that wrote it.",
        )
    try:
        inflater = zlib.decompressobj()
        plain = inflater.decompress(body, _MAX_BYTES)
        if not inflater.eof:
            raise ValueError("it is cut off")
        return msgspec.msgpack.decode(plain, type=FlightRecord, ext_hook=_decode)
    except (zlib.error, msgspec.MsgspecError, ValueError, TypeError) as error:
        raise ConfigError(f"{name} is damaged: {error}.", hint="Copy it again.") from None


def int32s(data: bytes) -> Int32Array:
    """Return the numbers of a field that holds the bytes of int32. Pure."""
    return np.frombuffer(data, "<i4")


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(_ARRAY, value.dtype.str.encode() + b" " + np.ascontiguousarray(value).tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} cannot be written to a flight record")


def _decode(code: int, data: memoryview) -> Any:
    kind, _, body = bytes(data).partition(b" ")
    dtype = np.dtype(kind.decode())
    if code != _ARRAY or dtype.hasobject:
        raise ValueError(f"it holds an unknown value of type {code}")
    return np.frombuffer(body, dtype).copy()
