"""Trace formats: files in which others publish loads, read row by row into one record.

A format is recognised by its columns. For each column it says what it means for the load; columns that tell how the recorded system
served a request are not part of the load. A reader that wants the whole load refuses every other column; one that wants sizes and times
alone looks at nothing else.
"""

from __future__ import annotations

import csv
import datetime
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import attrs

from trencadis.errors import ConfigError, ConfigValueError, did_you_mean
from trencadis.files import parse_json

__all__ = ["FORMATS", "TraceFormat", "TraceRow", "csv_rows", "read_rows"]

Row = Mapping[str, Any]


@attrs.frozen(kw_only=True)
class TraceRow:
    """One request of a trace, as far as its format tells.

    Attributes:
        line: In the file, from 1.
        arrival_s: On the trace's own clock; None where a format records no times.
        num_prompt_tokens: 0 where the prompt is given as text, or the request failed.
        num_output_tokens: 0 if the request failed; None if the format does not say.
        num_chars: Length of the prompt's text, where that stands for its tokens.
        num_images: In the prompt.
        block_ids: Ids of the prompt's blocks, head first; equal ids have equal contents and equal predecessors.
        block_tokens: Tokens in such a block.
        request_id: Empty if the format has none.
        follows: Id of the request whose conversation it goes on with; empty if the format does not say.
        session: Empty if it belongs to none.
        parent_session: The session that started this one; empty if none did.
        is_delta: The prompt continues those of its session: its tokens come after the prompt and the answer before.
        delay_s: From the answer before it in its session until it was sent; None if the format does not say.
        ended_s: When its answer was complete, on the trace's clock; None if the format does not say.
        tenant: Empty if the format has none.
        priority: Smaller is more urgent; None if the format has none.
        max_tokens: Longest answer that it allowed; 0 if the format does not say.
        ttft_target_s: Objective for the first token; None if the format has none.
        tpot_target_s: Objective from token to token; None if the format has none.
    """

    line: int
    arrival_s: float | None
    num_prompt_tokens: int
    num_output_tokens: int | None
    num_chars: int = 0
    num_images: int = 0
    block_ids: tuple[int, ...] = ()
    block_tokens: int = 16
    request_id: str = ""
    follows: str = ""
    session: str = ""
    parent_session: str = ""
    is_delta: bool = False
    delay_s: float | None = None
    ended_s: float | None = None
    tenant: str = ""
    priority: int | None = None
    max_tokens: int = 0
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None


@attrs.frozen(kw_only=True)
class TraceFormat:
    """One format.

    Attributes:
        name: In workload files.
        required: Columns by which it is recognised.
        optional: Columns that count as well.
        measured: Columns that tell how the recorded system did; no part of the load.
        read: Makes requests of a row, which may be none or several.
    """

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    read: Callable[[Row, int], Iterator[TraceRow]] = attrs.field(repr=False)

    def unknown(self, columns: Collection[str]) -> list[str]:
        """Return the columns that have no meaning here, in the order given. Pure."""
        known = {*self.required, *self.optional, *self.measured, *_COMMON}
        return [column for column in columns if column not in known]


_COMMON = ("tenant", "priority", "max_tokens", "ttft_target_s", "tpot_target_s")
"""Columns that every format may have besides its own; they mean what ``WorkloadRequest`` says."""


def read_rows(
    text: str, name: str, *, kind: str = "", ignore: Collection[str] = (), strict: bool = True
) -> Iterator[TraceRow]:
    """Yield the requests of a trace in the order of its lines.

    Args:
        text: Text of the file.
        name: Name of the file, for messages.
        kind: Name of the format; empty: recognised by the columns.
        ignore: Columns that are not to count.
        strict: Refuse columns that have no meaning in the format, instead of reading the others alone.

    Raises:
        ConfigError: No known format, a line that does not fit it, or a column that would be dropped.
    """
    chosen: TraceFormat | None = None
    checked: Collection[str] = ()
    for line, row in _lines(text, name):
        try:
            if chosen is None:
                chosen = _format_of(row, name, line, kind)
            if strict and row.keys() != checked:
                _refuse_unknown(chosen, row, ignore, name, line)
                checked = row.keys()
            kept = {key: value for key, value in row.items() if key not in ignore} if ignore else row
            yield from chosen.read(kept, line)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(
                f"{name}: line {line} is no request: {what}.", hint="Correct or remove the line."
            ) from error


def _lines(text: str, name: str) -> Iterator[tuple[int, Row]]:
    """Yield line numbers and rows of JSON lines or of a CSV file."""
    if not text.lstrip().startswith("{"):
        reader = csv.DictReader(text.splitlines())
        for row in csv_rows(reader, name):
            yield reader.line_num, row
        if not reader.fieldnames or reader.line_num == 1:
            _format_of(dict.fromkeys(reader.fieldnames or ()), name, 1, "")
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                row = parse_json(line)
            except ValueError as error:
                raise ConfigError(
                    f"{name}: line {number} is no request: {error}.", hint="Correct or remove the line."
                ) from error
            if not isinstance(row, dict):
                raise ConfigError(f"{name}: line {number} is no request: {line[:40]}.", hint="Write JSON objects.")
            yield number, _flat(row)


def csv_rows(reader: csv.DictReader[str], name: str) -> Iterator[Row]:
    """Yield the rows of a CSV file.

    Raises:
        ConfigError: A line is none, such as one with a field of 2^17 characters.
    """
    try:
        yield from reader
    except csv.Error as error:
        raise ConfigError(
            f"{name}: line {reader.line_num} is no line of CSV: {error}.", hint="Correct or remove the line."
        ) from error


def _flat(row: Row, prefix: str = "") -> Row:
    """Return a row whose columns are paths such as ``event.request.model``. Pure."""
    if not any(isinstance(value, dict) for value in row.values()):
        return row if not prefix else {prefix + key: value for key, value in row.items()}
    flat: dict[str, Any] = {}
    for key, value in row.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _format_of(row: Row, name: str, line: int, kind: str) -> TraceFormat:
    if kind:
        found = [one for one in FORMATS if one.name == kind]
        if not found:
            raise ConfigValueError(
                f'format = "{kind}" of {name}: no such format.{did_you_mean(kind, [one.name for one in FORMATS])} '
                f"Choose one of: {', '.join(one.name for one in FORMATS)}."
            )
        return found[0]
    for one in FORMATS:
        if all(column in row for column in one.required):
            return one
    # The format that comes nearest, else the simplest: Azure's.
    nearest = max(FORMATS, key=lambda one: (sum(column in row for column in one.required), one.name == "azure"))
    missing = [column for column in nearest.required if column not in row]
    known = "; ".join(f"{one.name}: {', '.join(one.required)}" for one in FORMATS)
    raise ConfigError(
        f"{name}: line {line} is no request of a known format: it lacks {', '.join(missing)} of {nearest.name}.",
        hint=f"Formats and the columns that each must have: {known}.",
    )


def _refuse_unknown(chosen: TraceFormat, row: Row, ignore: Collection[str], name: str, line: int) -> None:
    unknown = [column for column in chosen.unknown(list(row)) if column not in ignore]
    if unknown:
        listed = ", ".join(json.dumps(column) for column in unknown)
        raise ConfigError(
            f"{name}: line {line}: the format {chosen.name} gives no meaning to column {listed}, which would be dropped.",
            hint=f"Say ignore = [{listed}] in [trace] of a workload file if it is not to count.",
        )


def _common(row: Row) -> dict[str, Any]:
    """Return the fields that columns of every format may fill. Pure."""
    found: dict[str, Any] = {}
    for column, convert in (
        ("tenant", str),
        ("priority", int),
        ("max_tokens", int),
        ("ttft_target_s", float),
        ("tpot_target_s", float),
    ):
        if row.get(column) not in (None, ""):
            found[column] = convert(row[column])
    return found


def _ids(given: Any) -> tuple[int, ...]:
    ids = tuple(int(block) for block in given or ())
    if ids and not (min(ids) >= 0 and max(ids) < 2**64):
        raise ValueError("a block id is a number from 0 to 2**64 - 1")
    return ids


# ------------------------------------------------------------------------------------------------ the formats


def _azure(row: Row, line: int) -> Iterator[TraceRow]:
    yield TraceRow(
        line=line,
        arrival_s=_seconds(row["TIMESTAMP"]),
        num_prompt_tokens=int(row["ContextTokens"]),
        num_output_tokens=int(row["GeneratedTokens"]),
        num_images=int(row.get("NumImages") or 0),
        **_common(row),
    )


def _seconds(timestamp: str) -> float:
    """Return a time in seconds; UTC if it names no zone."""
    # More than six digits of a fraction are not understood by every version of Python.
    moment = datetime.datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", timestamp))
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()


def _burstgpt(row: Row, line: int) -> Iterator[TraceRow]:
    num_prompt, num_output = int(row["Request tokens"]), int(row["Response tokens"])
    if row.get("Total tokens") and int(row["Total tokens"]) != num_prompt + num_output:
        raise ValueError(f"Total tokens is {row['Total tokens']}, not {num_prompt} + {num_output}")
    arrival_s = float(row["Timestamp"])
    elapsed = row.get("Elapsed time")
    names = [row[column] for column in ("Model", "Log Type") if row.get(column)]
    yield TraceRow(
        line=line,
        arrival_s=arrival_s,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        session=row.get("Session ID") or "",
        ended_s=arrival_s + float(elapsed) if elapsed else None,
        **({"tenant": "/".join(names)} | _common(row)),
    )


def _mooncake(row: Row, line: int) -> Iterator[TraceRow]:
    text = row.get("text_input")
    output, timestamp, delay = row.get("output_length"), row.get("timestamp"), row.get("delay")
    mode = row.get("context_mode")
    if mode not in (None, "deltas_without_responses", "message_array_with_responses"):
        raise ValueError(f"context_mode = {json.dumps(mode)} is not understood")
    session = str(row.get("session_id") or "")
    yield TraceRow(
        line=line,
        arrival_s=None if timestamp is None else float(timestamp) / 1000,
        num_prompt_tokens=0 if text is not None else int(row["input_length"]),
        num_output_tokens=None if output is None else int(output),
        num_chars=len(text or ""),
        block_ids=_ids(row.get("hash_ids")),
        block_tokens=512,
        session=session,
        is_delta=bool(session) and mode != "message_array_with_responses",
        delay_s=None if delay is None else float(delay) / 1000,
        **_common(row),
    )


def _turns(row: Row, line: int) -> Iterator[TraceRow]:
    """Several requests in one line: a conversation of aiperf."""
    for number, turn in enumerate(row.get("turns", [row])):
        unknown = [key for key in turn if key not in _TURN and "turns" in row]
        if unknown:
            raise ValueError(f"a turn has {', '.join(unknown)}, which has no meaning here")
        texts = [turn["text"]] if turn.get("text") is not None else list(turn["texts"])
        output, timestamp, delay = turn.get("output_length"), turn.get("timestamp"), turn.get("delay")
        yield TraceRow(
            line=line,
            arrival_s=None if timestamp is None else float(timestamp) / 1000,
            num_prompt_tokens=0,
            num_output_tokens=None if output is None else int(output),
            num_chars=sum(len(text) for text in texts),
            session=str(row.get("session_id") or (f"line {line}" if "turns" in row else "")),
            is_delta="turns" in row and number > 0,
            delay_s=None if delay is None else float(delay) / 1000,
            **_common(row),
        )


_TURN = ("text", "texts", "timestamp", "delay", "output_length", "role", "type")


def _bailian(row: Row, line: int) -> Iterator[TraceRow]:
    parent = int(row.get("parent_chat_id", -1))
    yield TraceRow(
        line=line,
        arrival_s=float(row["timestamp"]),
        num_prompt_tokens=int(row["input_length"]),
        num_output_tokens=int(row["output_length"]),
        block_ids=_ids(row.get("hash_ids")),
        request_id=str(row["chat_id"]),
        follows="" if parent == -1 else str(parent),
        **({"tenant": str(row.get("type") or "")} | _common(row)),
    )


def _servegen(row: Row, line: int) -> Iterator[TraceRow]:
    output = row.get("output_length")
    images = row.get("img_ids")
    yield TraceRow(
        line=line,
        arrival_s=None,
        num_prompt_tokens=int(row["input_length"]),
        num_output_tokens=None if output is None else int(output),
        num_images=int(row.get("type") == "multimodal") if images is None else len(images),
        block_ids=_ids(row.get("hash_ids")),
        request_id=str(row["request_id"]),
        **_common(row),
    )


def _dynamo(row: Row, line: int) -> Iterator[TraceRow]:
    at = "event.request."
    if f"{at}request_id" not in row:
        return  # of a tool: its time is between the requests of its session
    received_s = float(row[f"{at}request_received_ms"]) / 1000
    yield TraceRow(
        line=line,
        arrival_s=received_s,
        num_prompt_tokens=int(row[f"{at}input_tokens"]),
        num_output_tokens=int(row[f"{at}output_tokens"]),
        block_ids=_ids(row.get(f"{at}replay.input_sequence_hashes")),
        block_tokens=int(row.get(f"{at}replay.trace_block_size", 16)),
        request_id=row[f"{at}request_id"],
        session=row.get("event.agent_context.session_id", ""),
        parent_session=row.get("event.agent_context.parent_session_id", ""),
        ended_s=received_s + float(row[f"{at}total_time_ms"]) / 1000,
        **({"tenant": row.get(f"{at}model", "")} | _common(row)),
    )


_DYNAMO_LOAD = (
    "timestamp",
    "event.schema",
    "event.event_time_unix_ms",
    "event.event_source",
    "event.agent_context.session_id",
    "event.agent_context.parent_session_id",
    *(
        f"event.request.{column}"
        for column in (
            *("request_id", "x_request_id", "model", "input_tokens", "output_tokens", "request_received_ms"),
            *("total_time_ms", "replay.trace_block_size", "replay.input_length", "replay.input_sequence_hashes"),
        )
    ),
    *(
        f"event.tool.{column}"
        for column in (
            *("tool_call_id", "tool_class", "started_at_unix_ms", "ended_at_unix_ms", "status", "duration_ms"),
            *("output_bytes", "error_type"),
        )
    ),
)
_DYNAMO_MEASURED = tuple(
    f"event.request.{column}"
    for column in (
        *("cached_tokens", "prefill_wait_time_ms", "prefill_time_ms", "ttft_ms", "avg_itl_ms", "kv_hit_rate"),
        *("queue_depth", "worker.prefill_worker_id", "worker.prefill_dp_rank", "worker.decode_worker_id"),
        "worker.decode_dp_rank",
    )
)

FORMATS: tuple[TraceFormat, ...] = (
    TraceFormat(
        name="dynamo", required=("event.event_type",), optional=_DYNAMO_LOAD, measured=_DYNAMO_MEASURED, read=_dynamo
    ),
    TraceFormat(
        name="bailian",
        required=("chat_id", "timestamp", "input_length", "output_length"),
        optional=("parent_chat_id", "type", "turn", "hash_ids"),
        read=_bailian,
    ),
    TraceFormat(
        name="servegen",
        required=("request_id", "type", "input_length"),
        optional=("output_length", "hash_ids", "img_ids"),
        measured=("duration",),
        read=_servegen,
    ),
    TraceFormat(
        name="mooncake",
        required=("input_length",),
        optional=("type", "timestamp", "output_length", "hash_ids", "session_id", "delay", "context_mode"),
        read=_mooncake,
    ),
    TraceFormat(
        name="aiperf_text",
        required=("text_input",),
        optional=("type", "timestamp", "output_length", "session_id", "delay", "context_mode"),
        read=_mooncake,
    ),
    TraceFormat(name="aiperf_turns", required=("turns",), optional=("type", "session_id"), read=_turns),
    TraceFormat(name="aiperf_single", required=("text",), optional=(*_TURN, "session_id"), read=_turns),
    TraceFormat(
        name="burstgpt",
        required=("Timestamp", "Request tokens", "Response tokens"),
        optional=("Model", "Total tokens", "Log Type", "Session ID", "Elapsed time"),
        read=_burstgpt,
    ),
    TraceFormat(
        name="azure", required=("TIMESTAMP", "ContextTokens", "GeneratedTokens"), optional=("NumImages",), read=_azure
    ),
)
"""In the order in which they are tried. Sources: the loaders of aiperf 0.13 (Mooncake, Bailian, BurstGPT, turns), the README files of
HPMLL/BurstGPT, Azure/AzurePublicDataset and alibaba/ServeGen ``data/offline``, and the schema ``dynamo.request.trace.v1``."""
