"""Requests as someone measured them on a real engine: when each came, how long it was, when its first and its last token came."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np

from trencadis.errors import ConfigError, did_you_mean
from trencadis.files import parse_json
from trencadis.records import FloatArray
from trencadis_gallery.bucketing.workloads.trace import read_text
from trencadis_tools.workloads.workload import Workload, WorkloadRequest

__all__ = ["MeasuredRequest", "MeasuredRun", "read_measured"]

_ARRIVAL: Final = ("arrival_s", "sent_s", "queued_ts", "arrival_time")
_PROMPT: Final = ("num_prompt_tokens", "input_toks")
_OUTPUT: Final = ("num_output_tokens", "output_toks")
_FIRST: Final = ("first_token_s", "first_token_ts", "ttft_s")
_END: Final = ("finished_s", "last_token_ts", "e2e_s", "tpot_s")
_SERVED: Final = ("start_times", "input_lens", "output_lens", "ttfts", "itls")
"""Lists in the file of ``vllm bench serve --save-detailed``; the last one holds lists."""
_ONE_RUN: Final = ("at", "config", "seed")
"""Columns of ``trencadis compare --requests`` that tell runs apart."""
_MOST_TOKENS: Final = 100_000_000


@attrs.frozen(kw_only=True)
class MeasuredRequest:
    """One answered request. Times are seconds on one clock.

    Attributes:
        request: The request, as in a workload; ``arrival_s`` counts from the first arrival of the file.
        ttft_s: From its arrival to its first token, above 0.
        decode_s: From its first to its last token.
    """

    request: WorkloadRequest
    ttft_s: float
    decode_s: float


@attrs.frozen(kw_only=True)
class MeasuredRun:
    """The requests of a file, by arrival.

    Attributes:
        name: Name of the file.
        requests: At least one.
        num_failed: Requests with an error, which are left out.
        num_cached: Requests that say that a part of their prompt was not computed but cached.
    """

    name: str
    requests: tuple[MeasuredRequest, ...] = attrs.field(repr=lambda requests: f"<{len(requests)} requests>")
    num_failed: int = 0
    num_cached: int = 0

    @property
    def workload(self) -> Workload:
        """What came when, and how long it was."""
        return Workload(name=Path(self.name).stem, requests=tuple(one.request for one in self.requests))

    @property
    def ttft_s(self) -> FloatArray:
        """From arrival to first token, float64 ``[num_requests]``."""
        return np.array([one.ttft_s for one in self.requests], np.float64)

    @property
    def decode_s(self) -> FloatArray:
        """From first to last token, float64 ``[num_requests]``."""
        return np.array([one.decode_s for one in self.requests], np.float64)


def read_measured(file: Path) -> MeasuredRun:
    """Return the requests of a file: JSON lines or CSV with a row for each, or what ``vllm bench serve --save-detailed`` wrote.

    Raises:
        ConfigError: It cannot be read, a row is no answered request, or rows are of several runs; names the line.
    """
    found: list[tuple[float, MeasuredRequest]] = []
    runs: set[tuple[str, ...]] = set()
    num_failed = num_cached = 0
    for where, row in _rows(read_text(file), str(file)):
        runs.add(tuple(str(row.get(name) or "") for name in _ONE_RUN))
        if len(runs) > 1:
            raise ConfigError(
                f"{where}: is of another run than the rows before it.",
                hint="Keep the rows of one run: at, config and seed.",
            )
        if row.get("error"):
            num_failed += 1
            continue
        num_cached += row.get("num_cached_tokens") not in (None, "", "0", 0)
        found.append(_request(row, where, len(found)))
    if not found:
        raise ConfigError(f"{file}: holds no answered request.", hint="Write a line for each request.")
    start_s = min(arrival_s for arrival_s, _ in found)
    found.sort(key=lambda one: one[0])
    started = tuple(_moved(one, arrival_s - start_s) for arrival_s, one in found)
    return MeasuredRun(name=str(file), requests=started, num_failed=num_failed, num_cached=num_cached)


def _moved(one: MeasuredRequest, arrival_s: float) -> MeasuredRequest:
    return attrs.evolve(one, request=attrs.evolve(one.request, arrival_s=arrival_s))


def _rows(text: str, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each row with the words that say where it is."""
    if not text.lstrip().startswith("{"):
        reader = csv.DictReader(text.splitlines())
        for row in reader:
            yield f"{name}, line {reader.line_num}", row
        return
    served = _served(text)
    if served is not None:
        yield from _served_rows(served, name)
        return
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            row = parse_json(line)
        except ValueError as error:
            raise ConfigError(f"{where}: is no JSON: {error}.", hint="Correct or remove the line.") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: is no JSON object: {line[:40]}.", hint="Correct or remove the line.")
        yield where, row


def _served(text: str) -> Mapping[str, Any] | None:
    """Return the object of a file that is one JSON object with lists of requests; None: it is another file. Pure."""
    try:
        found = parse_json(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) and ("ttfts" in found or "input_lens" in found) else None


def _served_rows(served: Mapping[str, Any], name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    lists = [served.get(key) for key in _SERVED]
    missing = [key for key, one in zip(_SERVED, lists, strict=True) if not isinstance(one, list)]
    if missing:
        raise ConfigError(
            f"{name}: has no list {', '.join(missing)}.",
            hint="Measure with vllm bench serve --save-result --save-detailed; older versions write no start_times.",
        )
    errors = served.get("errors")
    errors = errors if isinstance(errors, list) and errors else [""] * len(served["ttfts"])
    if len({len(one) for one in (*lists, errors) if one is not None}) > 1:
        raise ConfigError(f"{name}: its lists of requests are not equally long.", hint="Measure again.")
    columns = zip(served["start_times"], served["input_lens"], served["output_lens"], served["ttfts"], strict=True)
    for index, (sent_s, num_prompt, num_output, ttft_s) in enumerate(columns):
        gaps, where = served["itls"][index], f"{name}, request {index} of its lists"
        if not isinstance(gaps, list):
            raise ConfigError(f"{where}: itls is {gaps!r} and no list.", hint="Measure again.")
        decode_s = math.fsum(_number({"itls": gap}, "itls", where) for gap in gaps)
        row = {"sent_s": sent_s, "num_prompt_tokens": num_prompt, "num_output_tokens": num_output, "ttft_s": ttft_s}
        failed = errors[index]
        yield where, row | {"error": failed} | ({} if failed else {"e2e_s": _number(row, "ttft_s", where) + decode_s})


def _request(row: Mapping[str, Any], where: str, index: int) -> tuple[float, MeasuredRequest]:
    """Return when a request came by the clock of its file, and the request as if it came at 0."""
    arrival_s = _number(row, _column(row, _ARRIVAL, where), where)
    num_prompt = _whole(row, _column(row, _PROMPT, where), where)
    num_output = _whole(row, _column(row, _OUTPUT, where), where)
    first, end = _column(row, _FIRST, where), _column(row, _END, where)
    first_s, end_s = _number(row, first, where), _number(row, end, where)
    ttft_s = first_s if first == "ttft_s" else first_s - arrival_s
    if not ttft_s > 0:
        raise ConfigError(
            f"{where}: {first} = {first_s:g} is not after the arrival of the request, {arrival_s:g}.",
            hint="Times are seconds on one clock; a TTFT is above 0.",
        )
    if end == "tpot_s":
        decode_s = end_s * (num_output - 1)
    else:
        decode_s = (end_s if end == "e2e_s" else end_s - arrival_s) - ttft_s
    # What is said twice in decimals may differ in the last of them.
    if decode_s < -1e-6 or (num_output > 1 and decode_s <= 0):
        what = "before its arrival" if decode_s + ttft_s < 0 else f"not after its first token, {first} = {first_s:g}"
        raise ConfigError(f"{where}: {end} = {end_s:g} is {what}.", hint="Times are seconds on one clock.")
    request = WorkloadRequest(
        request_id=str(index),
        arrival_s=0.0,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        tenant=str(row.get("tenant") or "default"),
        priority=_whole(row, "priority", where, least=-_MOST_TOKENS) if row.get("priority") else 0,
    )
    return arrival_s, MeasuredRequest(request=request, ttft_s=ttft_s, decode_s=max(0.0, decode_s))


def _column(row: Mapping[str, Any], names: Sequence[str], where: str) -> str:
    """Return the first of some columns that a row has a value for."""
    for name in names:
        if row.get(name) not in (None, ""):
            return name
    known = [*_ARRIVAL, *_PROMPT, *_OUTPUT, *_FIRST, *_END]
    guesses = "".join(guess for name in row if name not in known and (guess := did_you_mean(str(name), names)))
    raise ConfigError(
        f"{where}: has no {' or '.join(names)}.{guesses}",
        hint=f"A request has one of each: {'; '.join(', '.join(one) for one in (_ARRIVAL, _PROMPT, _OUTPUT, _FIRST, _END))}.",
    )


def _number(row: Mapping[str, Any], name: str, where: str) -> float:
    value = row[name]
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise ConfigError(f"{where}: {name} = {value!r} is no number of 0 or more.", hint="Correct or remove the line.")
    return number


def _whole(row: Mapping[str, Any], name: str, where: str, *, least: int = 1) -> int:
    value = row[name]
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (least <= number <= _MOST_TOKENS and number == int(number)):
        raise ConfigError(
            f"{where}: {name} = {value!r} is no whole number from {least} to {_MOST_TOKENS:,}.",
            hint="Correct or remove the line.",
        )
    return int(number)
