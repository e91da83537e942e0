"""What a flight record holds, and its file: the last steps of an engine, from which the same schedule can be made again.

    TRENCADIS-FLIGHT 1, a line of text ▶ zlib( msgpack( FlightRecord ) )

Nothing in it is text or a token id. Of two requests it says only how many first tokens they have in common, which is all that a prefix
cache depends on.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from trencadis.errors import ConfigError
from trencadis.faults import as_words
from trencadis.records import Int32Array
from trencadis_tools.recorder.flight_bounds import (
    MAX_BYTES,
    MAX_CHANGE_BYTES,
    Bytes,
    Count,
    Number,
    Numbers,
    Ratio,
    Seconds,
    Size,
    Target,
    Text,
)

__all__ = [
    "FLIGHT_RECORD_VERSION",
    "ComponentCode",
    "RecordedEvent",
    "FlightRecord",
    "RecordedArrival",
    "RecordedAttempt",
    "RecordedChange",
    "RecordedCommit",
    "RecordedEnd",
    "RecordedFailure",
    "RecordedRequest",
    "decode_flight_record",
    "encode_flight_record",
    "int32s",
]

FLIGHT_RECORD_VERSION = 2
_MAGIC = b"TRENCADIS-FLIGHT "
_ARRAY = 1
"""Extension type of msgpack: a numpy array, as its type, a space, and its bytes."""


_ARRAY_NAMES = frozenset(
    f"{order}{kind}{size}".encode()
    for kind, sizes in (("b", (1,)), ("i", (1, 2, 4, 8)), ("u", (1, 2, 4, 8)), ("f", (2, 4, 8)))
    for size in sizes
    for order in ("|" if size == 1 else "<>")
)
"""Types that an array of a record may have: numbers."""

ComponentCode = tuple[Text, Text, Text, Text]
"""Name of a component, its distribution, the version, and the digest of its code."""

Components = Annotated[dict[Text, ComponentCode], Meta(max_length=1024)]
"""By dotted path of the setting that names the component."""


class RecordedRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request that was in the engine while steps were recorded.

    Attributes:
        number: 0, 1, ...; by which events name it.
        request_id: Name that the client or the door gave it.
        slot: Slot of the sequence in the engine.
        arrival_s: Engine clock.
        num_prompt_tokens: Number of prompt tokens.
        num_known_tokens: When it was added: more than the prompt if another engine began it.
        num_tokens: Known at the end of the record, or when it ended.
        like: Another request, which begins like it.
        num_like: So many first tokens are those of ``like``; the next one differs. 0: none are.
        max_tokens: Asked for; None: what fits.
        min_tokens: The same.
        wants_prompt_logprobs: Whether log-probabilities of the prompt are wanted: it is computed, whatever is cached.
        tenant: See ``RequestTerms``.
        cache_salt: A name for it, equal where the salt was; None: the tenant.
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

    number: Count
    request_id: Text
    slot: Count
    arrival_s: Seconds
    num_prompt_tokens: Count
    num_known_tokens: Count
    num_tokens: Count
    like: Number = -1
    num_like: Count = 0
    max_tokens: Count | None = None
    min_tokens: Count = 0
    wants_prompt_logprobs: bool = False
    tenant: Text = ""
    cache_salt: Text | None = None
    priority: int = 0
    weight: Ratio | None = None
    ttft_target_s: Target = float("inf")
    tpot_target_s: Target = float("inf")
    finish_reason: Text = ""
    ends_by_token: bool = False
    finish_s: Seconds = 0.0
    first_token_s: Seconds = 0.0
    num_cached_tokens: Count = 0
    num_preemptions: Count = 0

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far."""
        return self.num_tokens - self.num_prompt_tokens


class RecordedArrival(msgspec.Struct, array_like=True, tag="arrival", frozen=True):
    """A request was added."""

    now_s: Seconds
    number: Count


class RecordedEnd(msgspec.Struct, array_like=True, tag="end", frozen=True):
    """A client gave a request up, or found its text complete.

    Attributes:
        now_s: Engine clock.
        number: Number of the request.
        is_complete: A stop string was found.
    """

    now_s: Seconds
    number: Count
    is_complete: bool


class RecordedAttempt(msgspec.Struct, array_like=True, tag="plan", frozen=True):
    """The scheduler was asked for a plan.

    Attributes:
        now_s: Engine clock.
        is_plan: Whether there was one.
        step: Number of the step.
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

    now_s: Seconds
    is_plan: bool
    step: Number
    slots: Bytes
    starts: Bytes
    counts: Bytes
    num_drafts: Bytes
    admitted: Numbers
    preempted: Numbers
    num_waiting: Number
    num_free_blocks: Number
    policy: Text

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

    wait_s: Seconds
    now_s: Seconds
    end_s: Seconds
    plan_s: Seconds
    device_s: Seconds
    num_emitted: Bytes
    errors: Numbers


class RecordedChange(msgspec.Struct, array_like=True, tag="change", frozen=True):
    """Scheduling was changed while the engine served.

    Attributes:
        now_s: Engine clock.
        packed: The change, as ``SchedulingChange.of`` takes it, in msgpack; without secrets.
        components: The policies that are in force since, and what they name, by dotted path of the setting.
    """

    now_s: Seconds
    packed: Annotated[bytes, Meta(max_length=MAX_CHANGE_BYTES)]
    components: Components

    @classmethod
    def of(cls, now_s: float, table: Mapping[str, Any], components: Mapping[str, ComponentCode]) -> RecordedChange:
        """Return the event of a change. Pure.

        Raises:
            ValueError: No record can hold the table.
        """
        try:
            packed = msgspec.msgpack.encode(table)
        except (TypeError, OverflowError, RecursionError) as error:
            raise ValueError(str(error)) from None
        if len(packed) > MAX_CHANGE_BYTES:
            raise ValueError(f"it has {len(packed)} bytes")
        return cls(now_s, packed, dict(components))

    @property
    def table(self) -> dict[str, Any]:
        """The change."""
        found: dict[str, Any] = msgspec.msgpack.decode(self.packed, type=dict[str, Any])
        return found


class RecordedFailure(msgspec.Struct, array_like=True, tag="failure", frozen=True):
    """The oldest step in flight failed, or the newest plan could not be submitted.

    Attributes:
        now_s: Engine clock.
        step: Number of the step.
        error: Type of the error.
        was_submitted: It ran.
    """

    now_s: Seconds
    step: Number
    error: Text
    was_submitted: bool


RecordedEvent = RecordedArrival | RecordedEnd | RecordedAttempt | RecordedCommit | RecordedChange | RecordedFailure


class FlightRecord(msgspec.Struct, kw_only=True):
    """The last steps of one engine.

    Attributes:
        reason: Why it was written: ``request``, ``fault``, ``stall``.
        cause: In words.
        written_at: Seconds since 1970.
        version: Version of Trencadís.
        plan_hash: Hash of the plugins, versions and options.
        components: Code of the components in force at the start, by dotted path of the setting that names each.
        config: Tables of the core, without secrets and texts, as they were at the start.
        scheduling: Scheduling in force before the first event, as a change of ``config``; None: nothing had changed.
        model: Facts of the model.
        capabilities: Capabilities of the backend.
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

    reason: Text
    cause: Text
    written_at: Seconds
    version: Text
    plan_hash: Text
    components: Components
    config: dict[str, Any]
    scheduling: RecordedChange | None
    model: dict[str, Any]
    capabilities: dict[str, Any]
    num_blocks: Size
    block_size: Size
    max_model_len: Size
    num_in_flight: Annotated[int, Meta(ge=1, le=1024)]
    max_draft_tokens: Annotated[int, Meta(ge=0, le=1024)]
    frame: dict[str, Any] | None
    obstacles: Annotated[list[Text], Meta(max_length=1024)]
    requests: Annotated[list[RecordedRequest], Meta(max_length=2**18)]
    events: Annotated[list[RecordedEvent], Meta(max_length=2**20)]

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
        name: Name of the file, for messages.

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
        plain = inflater.decompress(body, MAX_BYTES)
        if not inflater.eof:
            is_large = len(plain) == MAX_BYTES
            raise ValueError(f"it holds more than {MAX_BYTES:,} bytes" if is_large else "it is cut off")
        free = msgspec.msgpack.decode(plain, type=_FreeParts)
        for field in msgspec.structs.fields(_FreeParts):
            if len(getattr(free, field.name)) > (most := _MAX_FREE_BYTES[field.name]):
                raise ValueError(f"its {field.name} has more than {most:,} bytes")
        record = msgspec.msgpack.decode(plain, type=FlightRecord, ext_hook=_decode)
        _check_record(record)
    except (zlib.error, msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{name} is damaged: {as_words(error)}.", hint="Copy it again.") from None
    return record


class _FreeParts(msgspec.Struct):
    """The fields of a record whose values have no type, still encoded: they are measured before they are decoded."""

    config: msgspec.Raw
    model: msgspec.Raw
    capabilities: msgspec.Raw
    frame: msgspec.Raw


_MAX_FREE_BYTES: Mapping[str, int] = {
    "config": 2**20,
    "model": 2**18,
    "capabilities": 2**16,
    "frame": 64 * 2**20,
}


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
    if code != _ARRAY or kind not in _ARRAY_NAMES:
        raise ValueError(f"it holds an unknown value of type {code}")
    return np.frombuffer(body, kind.decode()).copy()


_ARRAYS = ("slots", "starts", "counts", "num_drafts")
"""Fields of an event that hold a number for each sequence of a plan."""

_MAX_TOKENS = 2**26
"""Most tokens of all requests together: a replay holds four bytes for each."""

_MAX_BLOCKS = 2**24


def _check_record(record: FlightRecord) -> None:
    """Refuse a record whose parts do not fit each other. Pure.

    Raises:
        ValueError: They do not; says which.
    """
    if record.num_blocks > _MAX_BLOCKS:
        raise ValueError(f"it says {record.num_blocks:,} blocks, more than {_MAX_BLOCKS:,}")
    _check_requests(record.requests)
    for number, event in enumerate(record.events):
        _check_event(record, event, f"event {number}")


def _check_requests(requests: Sequence[RecordedRequest]) -> None:
    num_tokens = 0
    for number, one in enumerate(requests):
        where = f"request {number}"
        if one.number != number:
            raise ValueError(f"{where} has the number {one.number}")
        num_tokens += max(one.num_tokens, one.num_prompt_tokens, one.num_known_tokens)
        if num_tokens > _MAX_TOKENS:
            raise ValueError(f"its requests have more than {_MAX_TOKENS:,} tokens")
        if not one.num_like:
            continue
        if not 0 <= one.like < len(requests):
            raise ValueError(f"{where} begins like request {one.like}, which is not there")
        if one.num_like > min(one.num_tokens, requests[one.like].num_tokens):
            raise ValueError(f"{where} shares {one.num_like} tokens with request {one.like}, more than there are")
    _check_order(requests)


def _check_order(requests: Sequence[RecordedRequest]) -> None:
    """Refuse requests each of which begins like the next one, in a circle."""
    done = [not one.num_like for one in requests]
    for start in range(len(requests)):
        chain, number = [], start
        while not done[number]:
            done[number] = True
            chain.append(number)
            number = requests[number].like
        if chain and number in chain:
            raise ValueError(f"request {number} begins like itself, by way of others")


def _check_event(record: FlightRecord, event: Any, where: str) -> None:
    number = getattr(event, "number", None)
    if number is not None and number >= len(record.requests):
        raise ValueError(f"{where} is about request {number}, which is not there")
    lengths = {name: len(getattr(event, name)) for name in _ARRAYS if hasattr(event, name)}
    if any(length % 4 for length in lengths.values()):
        raise ValueError(f"{where} has numbers of another length than four bytes")
    if len({length for name, length in lengths.items() if length or name != "num_drafts"}) > 1:
        raise ValueError(f"{where} says something else of as many sequences as are in it")
    emitted = getattr(event, "num_emitted", b"")
    if emitted:
        counts = np.frombuffer(emitted, "<i4")
        if counts.min() < 0 or counts.max() > record.max_draft_tokens + 1:
            raise ValueError(f"{where} emits more tokens than there are drafts and one more")
