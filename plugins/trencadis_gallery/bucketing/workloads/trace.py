"""Traces as bucketing sees them: when requests arrived and how long they were; nothing else of a trace is looked at.

Every format of :mod:`trencadis_gallery.bucketing.workloads.formats` is read.
"""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import attrs

from trencadis.errors import ConfigError
from trencadis.files import MAX_BYTES, read_bytes
from trencadis_gallery.bucketing.workloads.formats import read_rows

__all__ = ["Arrival", "parse_trace", "read_text"]

_COMPRESSED: Mapping[bytes, Callable[[IO[bytes]], Any]] = {b"\x1f\x8b": gzip.open, b"\xfd7": lzma.open}
"""By the first two bytes of the file."""


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
    """Return the text of a trace file, which may be compressed with gzip or xz.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        content = read_bytes(file)
        opened = _COMPRESSED.get(content[:2])
        if opened is not None:
            with opened(io.BytesIO(content)) as unfolded:
                content = unfolded.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"it unfolds to more than {MAX_BYTES:,} bytes")
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such trace file.", hint="Correct the path.") from None
    except (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}.", hint="Give a CSV file or JSON lines.") from error


def parse_trace(text: str, name: str) -> tuple[Arrival, ...]:
    """Return the requests of a trace by time of arrival. Pure.

    Requests without a prompt or without an output token run no step worth a bucket and are left out.

    Args:
        text: Text of the file.
        name: Name of the file, for messages.

    Raises:
        ConfigError: No known format, a line that does not fit it, no times or lengths, or no request at all.
    """
    found = []
    for row in read_rows(text, name, strict=False):
        if row.arrival_s is None or row.num_output_tokens is None:
            missing = "arrival time" if row.arrival_s is None else "'output_length'"
            raise ConfigError(f"{name}: line {row.line} is no request: no {missing}.", hint="Give a trace that has it.")
        if row.num_prompt_tokens > 0 and row.num_output_tokens > 0:
            found.append(Arrival(row.arrival_s, row.num_prompt_tokens, row.num_output_tokens))
    if not found:
        raise ConfigError(f"{name}: holds no request.", hint="Give a trace with at least one request.")
    start_s = min(arrival.arrival_s for arrival in found)
    return tuple(sorted(attrs.evolve(arrival, arrival_s=arrival.arrival_s - start_s) for arrival in found))
