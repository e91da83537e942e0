"""Requests of a trace file; a trace with a column that cannot be used is refused."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import attrs
from attrs.validators import ge

from trencadis.errors import ConfigError
from trencadis_gallery.bucketing.workloads.formats import TraceRow, read_rows
from trencadis_gallery.bucketing.workloads.trace import read_text
from trencadis_tools.workloads.workload import WorkloadRequest

__all__ = ["Trace", "TraceSource", "read_trace"]


@attrs.frozen(kw_only=True)
class TraceSource:
    """Table ``[trace]`` of a workload file.

    Attributes:
        file: Path of the trace, relative to the workload file; may be compressed with gzip or xz.
        format: Name of the format; empty: recognised by the columns.
        ignore: Names of columns to ignore.
        failed: Handling of requests without a prompt or an output token, which failed when recorded: refuse the trace, drop them,
            or give them one token.
        sessions: closed: a request is sent when the preceding answer of its session has arrived and the recorded pause is over;
            open: at its recorded time; auto: closed if the trace has times of answers or pauses.
        image_tokens: Prompt tokens of an image; 0: a trace with images is refused.
        chars_per_token: Characters per token of prompts given as text; 0: such a trace is refused.
    """

    file: str = ""
    format: str = ""
    ignore: tuple[str, ...] = ()
    failed: Literal["refuse", "drop", "one_token"] = "refuse"
    sessions: Literal["auto", "closed", "open"] = "auto"
    image_tokens: int = attrs.field(default=0, validator=ge(0))
    chars_per_token: float = attrs.field(default=0.0, validator=ge(0))


@attrs.frozen(kw_only=True)
class Trace:
    """Content of a trace file.

    Attributes:
        requests: Requests by arrival time, those of a session in order.
        block_tokens: Tokens of a block in ``block_ids``.
        has_times: Whether the trace has arrival times; if not, all requests arrive at 0.
        has_outputs: Whether the trace has lengths of answers; if not, each has one token.
    """

    requests: list[WorkloadRequest] = attrs.field(repr=False)
    block_tokens: int
    has_times: bool
    has_outputs: bool


def read_trace(source: TraceSource) -> Trace:
    """Return the requests of a trace.

    Raises:
        ConfigError: The file cannot be read, a line is not a request of the format, or content would be ignored.
    """
    name = Path(source.file).name
    rows = []
    for row in read_rows(read_text(Path(source.file)), name, kind=source.format, ignore=source.ignore):
        if row.arrival_s is not None and not 0 <= row.arrival_s < math.inf:
            raise ConfigError(
                f"{name}: line {row.line} comes at {row.arrival_s:g} s, which is no time.",
                hint="Correct or remove the line.",
            )
        sized = _sized(row, source, name)
        if sized is not None:
            rows.append(sized)
    if not rows:
        raise ConfigError(f"{name}: holds no request.", hint="Give a trace with at least one request.")
    requests = _chained(rows, source, name)
    block_tokens = {row.block_tokens for row in rows if row.block_ids}
    timed = {row.arrival_s is not None for row, request in zip(rows, requests, strict=True) if not request.after}
    measured = {row.num_output_tokens is not None for row in rows}
    for found, what in (
        (block_tokens, "of two sizes"),
        (timed, "some with times"),
        (measured, "some with output lengths"),
    ):
        if len(found) > 1:
            raise ConfigError(f"{name}: requests differ: {what}.", hint="Give a trace of one kind.")
    start_s = min(request.arrival_s for request in requests)
    if start_s:
        requests = [attrs.evolve(request, arrival_s=request.arrival_s - start_s) for request in requests]
    return Trace(
        requests=sorted(requests, key=lambda request: request.arrival_s),
        block_tokens=min(block_tokens, default=16),
        has_times=True in timed,
        has_outputs=True in measured,
    )


def _sized(row: TraceRow, source: TraceSource, name: str) -> TraceRow | None:
    """Return the row with images and texts converted to tokens; None for a failed request to drop."""
    num_prompt, num_output = row.num_prompt_tokens, row.num_output_tokens
    if row.num_images and not source.image_tokens:
        raise ConfigError(
            f"{name}: line {row.line} has {row.num_images} images, which would be dropped.",
            hint="Say in [trace] of a workload file how many image_tokens each adds, or ignore the column that counts them.",
        )
    num_prompt += row.num_images * source.image_tokens
    if row.num_chars:
        if not source.chars_per_token:
            raise ConfigError(
                f"{name}: line {row.line} has its prompt as text, whose tokens are not known without a model.",
                hint="Say chars_per_token in [trace] of a workload file, such as 4.0.",
            )
        num_prompt += math.ceil(row.num_chars / source.chars_per_token)
    if num_prompt < 1 or (num_output is not None and num_output < 1):
        if source.failed == "drop":
            return None
        if source.failed == "refuse":
            raise ConfigError(
                f"{name}: line {row.line} has {num_prompt} prompt tokens and {num_output} output tokens: it failed where it was recorded.",
                hint='Say failed = "drop" or failed = "one_token" in [trace] of a workload file.',
            )
    sizes = (max(1, num_prompt), None if num_output is None else max(1, num_output))
    if sizes == (row.num_prompt_tokens, row.num_output_tokens):
        return row
    return attrs.evolve(row, num_prompt_tokens=sizes[0], num_output_tokens=sizes[1])


def _request(row: TraceRow, request_id: str, session: str) -> WorkloadRequest:
    return WorkloadRequest(
        request_id=request_id,
        arrival_s=row.arrival_s or 0.0,
        num_prompt_tokens=row.num_prompt_tokens,
        num_output_tokens=row.num_output_tokens or 1,
        max_tokens=row.max_tokens,
        tenant=row.tenant or "default",
        priority=row.priority or 0,
        session=session,
        block_ids=row.block_ids,
        ttft_target_s=row.ttft_target_s or math.inf,
        tpot_target_s=row.tpot_target_s or math.inf,
    )


def _chained(rows: Sequence[TraceRow], source: TraceSource, name: str) -> list[WorkloadRequest]:
    """Return the requests in the order of rows, linked to the request that they follow if sessions are closed."""
    ids = [row.request_id or str(index) for index, row in enumerate(rows)]
    sessions = _sessions(rows, ids)
    can_close = any(
        row.is_delta or row.delay_s is not None or (row.session and row.ended_s is not None) for row in rows
    )
    if source.sessions == "closed" and not can_close:
        raise ConfigError(
            f'{name}: sessions = "closed", but the trace tells neither pauses nor when answers came.',
            hint='Say sessions = "open": each request is then sent at its recorded time.',
        )
    if source.sessions == "open" or not can_close:
        if any(row.is_delta for row in rows):
            raise ConfigError(
                f'{name}: sessions = "open", but prompts go on from answers of the same session.', hint='Say "closed".'
            )
        return [_request(*made) for made in zip(rows, ids, sessions, strict=True)]
    if any(row.ended_s is not None for row in rows):
        return _by_recorded_ends(rows, ids, sessions)
    return _in_line_order(rows, ids, sessions)


def _sessions(rows: Sequence[TraceRow], ids: Sequence[str]) -> list[str]:
    """Return the session of each row: its own name, else the id of the first request of a conversation of several."""
    root = {one: one for one in ids}
    for row, one in zip(rows, ids, strict=True):
        root[one] = root.get(row.follows, one) if row.follows else one
    members = Counter(root[one] for one in ids)
    return [row.session or (root[one] if members[root[one]] > 1 else "") for row, one in zip(rows, ids, strict=True)]


def _in_line_order(rows: Sequence[TraceRow], ids: Sequence[str], sessions: Sequence[str]) -> list[WorkloadRequest]:
    """Return requests that follow the one on the previous line of their session, after the recorded pause."""
    latest: dict[str, WorkloadRequest] = {}
    requests = []
    for index, (row, one, session) in enumerate(zip(rows, ids, sessions, strict=True)):
        request = _request(row, one, session)
        before = latest.get(session) if session else None
        if before is not None:
            head = before.num_prompt_tokens + before.num_output_tokens
            request = attrs.evolve(
                request,
                arrival_s=max(before.arrival_s, request.arrival_s),
                after=before.request_id,
                think_s=row.delay_s or 0.0,
                num_prompt_tokens=request.num_prompt_tokens + (head if row.is_delta else 0),
                # Blocks after an answer of this session are in no other prompt, so they are not shared.
                block_ids=() if row.is_delta else request.block_ids or _private(index),
            )
        latest[session] = request
        requests.append(request)
    return requests


def _by_recorded_ends(rows: Sequence[TraceRow], ids: Sequence[str], sessions: Sequence[str]) -> list[WorkloadRequest]:
    """Return requests that follow the latest earlier answer in their session, its parent or its children."""
    made: dict[int, WorkloadRequest] = {}
    ended: dict[str, list[tuple[float, WorkloadRequest]]] = defaultdict(list)
    related: dict[str, set[str]] = defaultdict(set)
    for row, session in zip(rows, sessions, strict=True):
        related[session].add(session)
        if row.parent_session:
            related[session].add(row.parent_session)
            related[row.parent_session].add(session)
    for index in sorted(range(len(rows)), key=lambda index: (rows[index].arrival_s or 0.0, index)):
        row, session = rows[index], sessions[index]
        request = _request(row, ids[index], session)
        moments = [
            (end_s, before.request_id, before)
            for other in sorted(related[session])
            for end_s, before in ended[other]
            if end_s <= request.arrival_s
        ]
        if session and moments:
            end_s, _, before = max(moments, key=lambda moment: moment[:2])
            request = attrs.evolve(
                request,
                arrival_s=before.arrival_s,
                after=before.request_id,
                think_s=request.arrival_s - end_s,
                block_ids=request.block_ids or _private(index),
            )
        made[index] = request
        if row.ended_s is not None and session:
            ended[session].append((row.ended_s, request))
    return [made[index] for index in range(len(rows))]


def _private(index: int) -> tuple[int, ...]:
    """Return block ids, used by no trace, of a prompt that shares no prefix."""
    return (2**64 - 1 - index,)
