"""Workloads as JSON lines: a line for the workload and one for each request; reading returns an equal workload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

from trencadis.errors import ConfigError
from trencadis.files import parse_json
from trencadis_gallery.bucketing.workloads.trace import read_text
from trencadis_tools.workloads.workload import Workload, WorkloadRequest

__all__ = ["is_written", "parse_written", "write_workload"]

_FIRST = '{"workload": '
_DEFAULTS = {field.name: field.default for field in attrs.fields(WorkloadRequest) if field.default is not attrs.NOTHING}


def write_workload(workload: Workload, file: Path) -> None:
    """Write a workload; request fields with default values are omitted.

    Raises:
        ConfigError: The file cannot be written.
    """
    head = {"workload": workload.name, "block_tokens": workload.block_tokens, "seed": workload.seed}
    rows = [
        {name: value for name, value in _fields(request).items() if name not in _DEFAULTS or value != _DEFAULTS[name]}
        for request in workload.requests
    ]
    try:
        file.write_text("".join(json.dumps(row) + "\n" for row in (head, *rows)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error}.", hint="Give another path.") from error


def _fields(request: WorkloadRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in _NAMES}


_NAMES = [field.name for field in attrs.fields(WorkloadRequest)]


def is_written(file: Path) -> bool:
    """Return whether a file begins like those of :func:`write_workload`."""
    with file.open("rb") as opened:
        return opened.read(len(_FIRST)) == _FIRST.encode()


def parse_written(file: Path) -> Workload:
    """Return the workload that was written to a file.

    Raises:
        ConfigError: The file's content is not a valid workload.
    """
    requests: list[WorkloadRequest] = []
    head: dict[str, Any] = {}
    number = 0
    try:
        for number, line in enumerate(read_text(file).splitlines(), start=1):
            row = parse_json(line)
            if number == 1:
                head = row
                continue
            requests.append(WorkloadRequest(**row | {"block_ids": tuple(row.get("block_ids", ()))}))
        return Workload(
            name=head["workload"], requests=tuple(requests), block_tokens=head["block_tokens"], seed=head["seed"]
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{file}: line {number} is not what `trencadis workload --write` writes: {error}.",
            hint="Write the file again.",
        ) from error
