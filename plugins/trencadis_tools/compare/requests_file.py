"""Results of every request of a comparison as a table: CSV, or Parquet if pyarrow is installed."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trencadis.errors import ConfigError
from trencadis_tools.compare.experiment import PointResult
from trencadis_tools.lab import library
from trencadis_tools.simulation import RequestRecord
from trencadis_tools.simulation.qoe import qoe_of

__all__ = ["check_requests_file", "row_of", "write_requests", "write_rows"]

_PARQUET = ".parquet"


def check_requests_file(file: Path) -> None:
    """Check before any run that :func:`write_requests` can write the file.

    Raises:
        ConfigError: The suffix is neither .csv nor .parquet, or pyarrow is missing.
    """
    if file.suffix == _PARQUET:
        library("pyarrow.parquet", purpose=f"{file}: a Parquet file", install="pyarrow")
    elif file.suffix != ".csv":
        raise ConfigError(f"flag --requests: {file} ends in neither .csv nor .parquet.", hint="Choose one of them.")


def write_requests(file: Path, results: Sequence[PointResult]) -> None:
    """Write a row for each request under each configuration; missing values are empty.

    Args:
        file: Output file; its suffix is .csv or .parquet.
        results: Results of all points.

    Raises:
        ConfigError: The file cannot be written, or pyarrow is missing.
    """
    write_rows(file, list(_rows(results)))


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows with equal columns; NaN becomes empty.

    Args:
        file: Output file; its suffix is .csv or .parquet.
        rows: Rows by column, at least one.

    Raises:
        ConfigError: The file cannot be written, or pyarrow is missing.
    """
    check_requests_file(file)
    try:
        if file.suffix == _PARQUET:
            arrow, parquet = library("pyarrow", purpose=str(file)), library("pyarrow.parquet", purpose=str(file))
            columns = {name: [_or_none(row[name]) for row in rows] for name in rows[0]}
            parquet.write_table(arrow.table(columns), file)
            return
        with file.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows({name: _or_none(value) for name, value in row.items()} for row in rows)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error}.", hint="Give another path to --requests.") from error


def _or_none(value: Any) -> Any:
    return None if value != value else value  # NaN differs from itself


def _rows(results: Sequence[PointResult]) -> Iterator[dict[str, Any]]:
    for result in results:
        for candidate, runs in zip(result.candidates, result.runs, strict=True):
            for workload, run in zip(result.workloads, runs, strict=True):
                where = {"at": str(result.point), "config": candidate.name, "seed": workload.seed}
                yield from (where | row_of(record) for record in run.records)


def row_of(record: RequestRecord, *, token_times: bool = False) -> dict[str, Any]:
    """Return the results of a request by column. Pure.

    Args:
        record: Record of the request.
        token_times: Whether there is a column with the times of tokens: seconds since the start of the run, separated by spaces.
    """
    request, times_s = record.request, record.token_times_s
    times = {"token_times_s": "" if times_s is None else " ".join(map(repr, times_s.tolist()))} if token_times else {}
    return {
        "request_id": request.request_id,
        "tenant": request.tenant,
        "priority": request.priority,
        "session": request.session,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_cached_tokens": record.num_cached_tokens,
        "num_output_tokens": record.num_output_tokens,
        "sent_s": record.sent_s,
        "first_token_s": record.first_token_s,
        "finished_s": record.finished_s,
        "ttft_s": record.ttft_s,
        "tpot_s": record.tpot_s,
        "e2e_s": record.e2e_s,
        "max_itl_s": record.max_itl_s,
        "qoe": qoe_of(record),
        "replica": record.replica,
        "num_preemptions": record.num_preemptions,
        **times,
        "error": record.error,
    }
