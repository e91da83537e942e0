"""Converts records to messages and back; arrays are copied once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import numpy as np

from trencadis import errors
from trencadis.client.engine_client import StepOutputs
from trencadis.client.process.messages import (
    HASH_BYTES,
    AddMessage,
    EmbeddingPart,
    Fault,
    FinishedPart,
    LoadMessage,
    LogprobsPart,
    ReadyMessage,
    StepMessage,
)
from trencadis.errors import InternalError, InvalidRequestError, RequestRefusedError, TrencadisError
from trencadis.records import (
    DEFAULT_TERMS,
    Embedding,
    EngineLoad,
    FinishedSequence,
    FinishReason,
    Int32Array,
    ModelFacts,
    Request,
    SamplingParams,
    TokenDeltas,
    TokenLogprobs,
)
from trencadis.startup import LedgerEntry

__all__ = [
    "add_message",
    "error_of",
    "fault_of",
    "int32_bytes",
    "int32_ids",
    "load_message",
    "load_of",
    "model_of",
    "step_outputs",
    "prompt_messages",
    "readable",
    "ready_message",
    "request_of",
    "step_message",
]

_DEFAULTS = attrs.asdict(SamplingParams(), recurse=False)
_DEFAULT_TERMS = attrs.asdict(DEFAULT_TERMS, recurse=False)
_MAX_ENTRIES = 128
"""Tokens of a prompt whose log-probabilities are one message: at 50 alternatives each, it is decoded in two milliseconds."""
_REASONS = {reason.value: reason for reason in FinishReason}


# ---------------------------------------------------------------------------------------------------- client to worker


def int32_bytes(token_ids: Iterable[int]) -> bytes:
    """Return whole numbers below 2**31 as int32. Pure."""
    return np.fromiter(token_ids, "<i4").tobytes()


def int32_ids(data: bytes) -> tuple[int, ...]:
    """Return what :func:`int32_bytes` was given. Pure."""
    return tuple(np.frombuffer(data, "<i4").tolist())


def add_message(request: Request, handle: int, prompt: bytes | None = None) -> AddMessage:
    """Return a request as a message. Pure.

    Args:
        request: The request.
        handle: Its number on both sides.
        prompt: Its token ids as :func:`int32_bytes` gives them, if they are at hand.
    """
    terms = _changed(request, _DEFAULT_TERMS)
    if "transfer_params" in terms:
        terms["transfer_params"] = _json_bytes(request.transfer_params)
    return AddMessage(
        handle=handle,
        request_id=request.request_id,
        prompt_token_ids=int32_bytes(request.prompt_token_ids) if prompt is None else prompt,
        params=_changed(request.params, _DEFAULTS),
        terms=terms,
        output_token_ids=None if request.output_token_ids is None else int32_bytes(request.output_token_ids),
        end_token_ids=request.end_token_ids,
    )


def _changed(record: object, defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, default in defaults.items() if (value := getattr(record, name)) != default}


def request_of(message: AddMessage) -> Request:
    """Return the request that :func:`add_message` was given. Pure.

    Raises:
        InvalidRequestError: Sampling parameters that no client could have made.
    """
    terms = dict(message.terms)
    if "transfer_params" in terms:
        terms["transfer_params"] = json.loads(terms["transfer_params"])
    return Request(
        request_id=message.request_id,
        prompt_token_ids=int32_ids(message.prompt_token_ids),
        params=SamplingParams(**message.params),
        output_token_ids=None if message.output_token_ids is None else int32_ids(message.output_token_ids),
        end_token_ids=message.end_token_ids,
        **terms,
    )


def _json_bytes(table: Mapping[str, Any] | None) -> bytes:
    # JSON, not msgpack: a connector is given what a client wrote.
    return b"" if table is None else json.dumps(dict(table)).encode("ascii")


def _json_table(data: bytes) -> dict[str, Any] | None:
    table: dict[str, Any] | None = json.loads(data) if data else None
    return table


# ---------------------------------------------------------------------------------------------------- worker to client


def ready_message(
    model: ModelFacts,
    *,
    max_model_len: int,
    plan_hash: str,
    hashing: tuple[str, int] | None = None,
    start: tuple[LedgerEntry, ...] = (),
) -> ReadyMessage:
    """Return the first message of a worker. Pure."""
    return ReadyMessage(
        model=attrs.asdict(model), max_model_len=max_model_len, plan_hash=plan_hash, hashing=hashing, start=start
    )


def load_message(load: EngineLoad) -> LoadMessage:
    """Return an engine's load as a message. Pure."""
    return LoadMessage(
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        kv_usage=load.kv_usage,
        added=b"".join([one[:HASH_BYTES] for one in load.added]),
        removed=b"".join([one[:HASH_BYTES] for one in load.removed]),
    )


def load_of(message: LoadMessage) -> EngineLoad:
    """Return the load that :func:`load_message` was given, hashes cut. Pure."""
    return EngineLoad(
        num_waiting=message.num_waiting,
        num_running=message.num_running,
        kv_usage=message.kv_usage,
        added=_cut_hashes(message.added),
        removed=_cut_hashes(message.removed),
    )


def _cut_hashes(data: bytes) -> tuple[bytes, ...]:
    return tuple([data[start : start + HASH_BYTES] for start in range(0, len(data), HASH_BYTES)])


def model_of(message: ReadyMessage) -> ModelFacts:
    """Return the model's facts. Pure."""
    facts: dict[str, Any] = message.model
    return ModelFacts(**{**facts, "eos_token_ids": tuple(facts["eos_token_ids"])})


def prompt_messages(deltas: TokenDeltas, handle_of_slot: Int32Array) -> Iterator[StepMessage]:
    """Yield messages with the log-probabilities of prompts, which may be many: a client takes other messages between two of them. Pure.

    Args:
        deltas: Of the engine.
        handle_of_slot: Handle of the sequence in each slot.
    """
    entries = deltas.prompt_logprobs
    for start in range(0, len(entries), _MAX_ENTRIES):
        part = [
            _logprobs_part(entry, int(handle_of_slot[entry.index])) for entry in entries[start : start + _MAX_ENTRIES]
        ]
        yield StepMessage(handles=[], num_tokens=[], token_ids=[], prompt_logprobs=tuple(part))


def step_message(deltas: TokenDeltas, handle_of_slot: Int32Array, handles: Iterable[int]) -> StepMessage:
    """Return the outputs of a step as a message, without log-probabilities of prompts. Pure.

    Args:
        deltas: Of the engine.
        handle_of_slot: Handle of the sequence in each slot.
        handles: Of the finished sequences, in their order: a slot may have been given to another already.
    """
    return StepMessage(
        handles=handle_of_slot[deltas.slots].tolist(),
        num_tokens=deltas.num_tokens.tolist(),
        token_ids=deltas.token_ids.tolist(),
        finished=tuple(map(_finished_part, deltas.finished, handles)),
        logprobs=tuple([_logprobs_part(entry, entry.index) for entry in deltas.logprobs]),
        embeddings=tuple(map(_embedding_part, deltas.embeddings)),
    )


def step_outputs(message: StepMessage) -> StepOutputs:
    """Return the outputs of a step, with handles as slots. Pure."""
    return StepOutputs(
        slots=message.handles,
        num_tokens=message.num_tokens,
        token_ids=message.token_ids,
        finished=tuple(map(_finished, message.finished)),
        logprobs=tuple(map(_logprobs, message.logprobs)),
        prompt_logprobs=tuple(map(_logprobs, message.prompt_logprobs)),
        embeddings=tuple(map(_embedding, message.embeddings)),
    )


def _finished_part(finished: FinishedSequence, handle: int) -> FinishedPart:
    return FinishedPart(
        request_id=finished.request_id,
        handle=handle,
        token_ids=finished.token_ids.astype("<i4", copy=False).tobytes(),
        finish_reason=finished.finish_reason.value,
        num_prompt_tokens=finished.num_prompt_tokens,
        num_cached_tokens=finished.num_cached_tokens,
        num_preemptions=finished.num_preemptions,
        arrival_s=finished.arrival_s,
        first_scheduled_s=finished.first_scheduled_s,
        first_token_s=finished.first_token_s,
        finish_s=finished.finish_s,
        error=readable(finished.error),
        stop_token_id=finished.stop_token_id,
        transfer_params=_json_bytes(finished.transfer_params),
        num_approximate_tokens=finished.num_approximate_tokens,
    )


def _finished(part: FinishedPart) -> FinishedSequence:
    return FinishedSequence(
        request_id=part.request_id,
        slot=part.handle,
        token_ids=np.frombuffer(part.token_ids, "<i4"),
        finish_reason=_REASONS[part.finish_reason],
        num_prompt_tokens=part.num_prompt_tokens,
        num_cached_tokens=part.num_cached_tokens,
        num_preemptions=part.num_preemptions,
        arrival_s=part.arrival_s,
        first_scheduled_s=part.first_scheduled_s,
        first_token_s=part.first_token_s,
        finish_s=part.finish_s,
        error=part.error,
        stop_token_id=part.stop_token_id,
        transfer_params=_json_table(part.transfer_params),
        num_approximate_tokens=part.num_approximate_tokens,
    )


def _logprobs_part(entry: TokenLogprobs, index: int) -> LogprobsPart:
    return LogprobsPart(
        index=index,
        position=entry.position,
        token_id=entry.token_id,
        logprob=entry.logprob,
        rank=entry.rank,
        top_token_ids=entry.top_token_ids,
        top_logprobs=entry.top_logprobs,
    )


def _logprobs(part: LogprobsPart) -> TokenLogprobs:
    return TokenLogprobs(
        index=part.index,
        position=part.position,
        token_id=part.token_id,
        logprob=part.logprob,
        rank=part.rank,
        top_token_ids=part.top_token_ids,
        top_logprobs=part.top_logprobs,
    )


def _embedding_part(embedding: Embedding) -> EmbeddingPart:
    return EmbeddingPart(
        request_id=embedding.request_id,
        vector=embedding.vector.astype("<f4", copy=False).tobytes(),
        num_tokens=embedding.num_tokens,
        error=readable(embedding.error),
    )


def _embedding(part: EmbeddingPart) -> Embedding:
    return Embedding(
        request_id=part.request_id,
        vector=np.frombuffer(part.vector, "<f4"),
        num_tokens=part.num_tokens,
        error=part.error,
    )


# ------------------------------------------------------------------------------------------------------------ errors


def fault_of(error: BaseException) -> Fault:
    """Return an error as the nearest class of :mod:`trencadis.errors`; anything else is a broken invariant. Pure."""
    if isinstance(error, TrencadisError):
        kind = next(one.__name__ for one in type(error).__mro__ if one.__name__ in errors.__all__)
        field = error.field if isinstance(error, InvalidRequestError) else ""
        retry_after_s = error.retry_after_s if isinstance(error, RequestRefusedError) else 1.0
        return Fault(
            kind=kind,
            message=readable(str(error)),
            hint=readable(error.hint),
            field=readable(field),
            retry_after_s=retry_after_s,
        )
    return Fault(kind=InternalError.__name__, message=readable(f"{type(error).__name__}: {error}"), hint="")


def readable(text: str) -> str:
    r"""Return a text that UTF-8 can hold: half a surrogate pair is written as ``\ud800``. Pure."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def error_of(fault: Fault) -> TrencadisError:
    """Return the error that :func:`fault_of` was given. Pure."""
    found = getattr(errors, fault.kind, None) if fault.kind in errors.__all__ else None
    kind = found if isinstance(found, type) and issubclass(found, TrencadisError) else InternalError
    error = kind(fault.message)  # the hint is part of the message already
    error.hint = fault.hint
    if isinstance(error, InvalidRequestError):
        error.field = fault.field
    if isinstance(error, RequestRefusedError):
        error.retry_after_s = fault.retry_after_s
    return error
