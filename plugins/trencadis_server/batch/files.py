"""Files of a batch. Lines are only appended to the output, so that an interrupted run can be resumed."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import attrs
import msgspec

from trencadis.errors import ConfigError
from trencadis.files import is_file
from trencadis_server.batch.lines import OutputLine, encode

__all__ = ["DUPLICATE", "Done", "OutputFile", "count_lines", "input_lines", "read_output"]

DUPLICATE = "duplicate_custom_id"
"""Code of a line whose ``custom_id`` an earlier line has."""


@attrs.frozen(kw_only=True)
class Done:
    """Lines that an earlier run has answered.

    Attributes:
        custom_ids: Values of ``custom_id`` of lines with an answer.
        ids: Ids of all lines in the output; a bad line may have no ``custom_id``.
        num_bytes: Bytes of the complete lines; a torn line may follow.
    """

    custom_ids: frozenset[str] = frozenset()
    ids: frozenset[str] = frozenset()
    num_bytes: int = 0


def input_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the non-empty lines, with their numbers from 1; a byte-order mark is skipped.

    Raises:
        ConfigError: The file cannot be read.
    """
    _check_regular(file, "Lines are counted before they are read, so --input cannot be a pipe.")
    try:
        with file.open("rb") as lines:
            for number, text in enumerate(lines, start=1):
                line = text.removeprefix(codecs.BOM_UTF8) if number == 1 else text
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}.", hint="Correct --input.") from error


def count_lines(file: Path) -> int:
    """Return the number of non-empty lines.

    Raises:
        ConfigError: The file cannot be read.
    """
    return sum(1 for _ in input_lines(file))


def read_output(file: Path) -> Done:
    """Return the content of an output file; empty if there is none.

    Raises:
        ConfigError: A line, other than a torn last one, was not written by a batch.
    """
    if not os.path.lexists(file):
        return Done()
    _check_regular(file, "A batch continues its output, so --output cannot be a pipe or a device.")
    custom_ids, ids, num_bytes = set(), set(), 0
    try:
        with file.open("rb") as lines:
            for number, text in enumerate(lines, start=1):
                if not text.endswith(b"\n"):
                    break
                num_bytes += len(text)
                if not text.strip():
                    continue
                line = _output_line(file, number, text)
                ids.add(line["id"])
                if isinstance(line.get("custom_id"), str) and (line.get("error") or {}).get("code") != DUPLICATE:
                    custom_ids.add(line["custom_id"])
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}.", hint="Correct --output.") from error
    return Done(custom_ids=frozenset(custom_ids), ids=frozenset(ids), num_bytes=num_bytes)


class OutputFile:
    """A file of output lines; a context manager.

    Args:
        file: Path of the file; created if missing.
        num_bytes: Length to keep, bytes; the rest is cut off.

    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(self, file: Path, *, num_bytes: int = 0) -> None:
        self._path = file
        try:
            # Unbuffered, so that a full disk raises where a line is written.
            self._file: FileIO = file.open("r+b" if file.exists() else "w+b", buffering=0)
            self._file.truncate(num_bytes)
            self._file.seek(num_bytes)
        except OSError as error:
            raise ConfigError(f"{file}: cannot be written: {error.strerror}.", hint="Choose another file.") from error

    def write(self, line: OutputLine) -> None:
        """Append a line, unbuffered.

        Raises:
            ConfigError: The disk is full, or fails.
        """
        rest = memoryview(encode(line))
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise ConfigError(
                f"{self._path}: cannot be written: {error.strerror}.",
                hint="Make room, then run the same command again: it goes on from here.",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()


def _check_regular(file: Path, why: str) -> None:
    """Raise ConfigError if a path exists and is not a regular file, since reading it may never end."""
    if os.path.exists(file) and not is_file(file):  # unlike the methods of a path, these raise for no name
        kind = "Is a directory" if os.path.isdir(file) else "Is no regular file"
        raise ConfigError(f"{file}: cannot be used: {kind}.", hint=why)


def _output_line(file: Path, number: int, text: bytes) -> dict[str, Any]:
    try:
        line = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        line = {}
    if not isinstance(line.get("id"), str) or "custom_id" not in line:
        raise ConfigError(
            f"{file}: line {number} was not written by run-batch.", hint="Choose another --output, or remove the file."
        )
    return line
