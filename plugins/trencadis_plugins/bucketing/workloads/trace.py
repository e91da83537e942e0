"""Traces: when requests arrived and how long they were; no text.

Two public formats are read: the CSV of the Azure LLM inference traces (``TIMESTAMP,ContextTokens,GeneratedTokens``), and
the JSON lines of the Mooncake traces (``timestamp`` in ms, ``input_length``, ``output_length``; other keys are ignored).
"""

from __future__ import annotations

import csv
import datetime
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from trencadis.errors import ConfigError

__all__ = ["Arrival", "parse_trace", "read_text"]

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@attrs.frozen(order=True)
class Arrival:
    """One request of a trace.

    Attributes:
        arrival_s: Seconds since the first request, at least 0.
        num_prompt_tokens: At least 1.
        num_output_tokens: At least 1.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int


def read_text(file: Path) -> str:
    """Return the text of a trace file.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such trace file.", hint="Correct the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}.", hint="Give a CSV file or JSON lines.") from error


def parse_trace(text: str, name: str) -> tuple[Arrival, ...]:
    """Return the requests of a trace by time of arrival. Pure.

    Requests without a prompt or without an output token run no step worth a bucket and are left out.

    Args:
        text: Of the file.
        name: Of the file, for messages.

    Raises:
        ConfigError: Neither format, a line that does not fit it, or no request at all.
    """
    rows = list(_json_lines(text, name) if text.lstrip().startswith("{") else _csv_lines(text, name))
    rows = [row for row in rows if row.num_prompt_tokens > 0 and row.num_output_tokens > 0]
    if not rows:
        raise ConfigError(f"{name}: holds no request.", hint="Give a trace with at least one request.")
    start_s = min(row.arrival_s for row in rows)
    return tuple(sorted(attrs.evolve(row, arrival_s=row.arrival_s - start_s) for row in rows))


def _csv_lines(text: str, name: str) -> Iterator[Arrival]:
    reader = csv.DictReader(text.splitlines())
    missing = [column for column in _AZURE if column not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(
            f"{name}: no trace that can be read: its first line lacks {', '.join(missing)}.",
            hint=f"Give a CSV file with the columns {', '.join(_AZURE)}, or JSON lines with timestamp, input_length and "
            "output_length.",
        )
    for row in reader:
        try:
            yield Arrival(_seconds(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        except (TypeError, ValueError) as error:
            raise _bad_line(name, reader.line_num, error) from error


def _seconds(timestamp: str) -> float:
    """Return a time in seconds; UTC if it names no zone."""
    # More than six digits of a fraction are not understood by every version of Python.
    moment = datetime.datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", timestamp))
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()


def _json_lines(text: str, name: str) -> Iterator[Arrival]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row: Mapping[str, Any] = json.loads(line)
            yield Arrival(float(row["timestamp"]) / 1000, int(row["input_length"]), int(row["output_length"]))
        except (KeyError, TypeError, ValueError) as error:
            raise _bad_line(name, number, error) from error


def _bad_line(name: str, number: int, error: Exception) -> ConfigError:
    what = f"no {error}" if isinstance(error, KeyError) else str(error)
    return ConfigError(f"{name}: line {number} is no request: {what}.", hint="Correct or remove the line.")
