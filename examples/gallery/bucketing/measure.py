"""Padding of fitted bucket tables and of the exponential one on traffic that the fit has not seen.

    python examples/gallery/bucketing/measure.py [--json FILE] [--limit N]

Of each trace the first half, by requests, is fitted, and the second half measured. Everything is done by `trencadis buckets`; padding is
computed from shapes and an estimate of the device's times, so that the same command prints the same numbers on every machine.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import attrs

from trencadis.cli import main as trencadis
from trencadis.console import print_table
from trencadis_tools.workloads import load_workload

TRACES: dict[str, tuple[str, ...]] = {
    "azure_conv": (),
    "azure_code": (),
    "mooncake_conversation": ("--max-model-len", "131072", "--max-num-seqs", "64"),
}
"""Built-in traces, and the limits that they need."""

BUDGETS = (16, 32, 64, 128)
"""Buckets that a fitted table may have."""


@attrs.frozen(kw_only=True)
class Row:
    """One table on one trace: what is computed beyond what was asked for, as a share of it."""

    trace: str
    table: str
    buckets: int
    warmup_s: float
    prompt_padding: float
    decode_padding: float
    time_padding: float


def write_halves(name: str, folder: Path, limit: int | None) -> tuple[Path, Path]:
    """Write the first and the second half of a trace as files that `trencadis buckets` reads."""
    requests = load_workload(name, limit=limit).requests
    middle = len(requests) // 2
    files = folder / f"{name}_first.jsonl", folder / f"{name}_second.jsonl"
    for file, part in zip(files, (requests[:middle], requests[middle:]), strict=True):
        rows = (
            {
                "timestamp": 1000 * (one.arrival_s - part[0].arrival_s),
                "input_length": one.num_prompt_tokens,
                "output_length": one.num_output_tokens,
                "hash_ids": [],
            }
            for one in part
        )
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files


def command(*words: str) -> str:
    """Run a command of trencadis in this process; return what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = trencadis([*words, "--log.level", "error"])
    if code:
        raise SystemExit(f"trencadis {' '.join(words)} ended with {code}")
    return printed.getvalue()


def measure(name: str, limits: tuple[str, ...], folder: Path, limit: int | None) -> list[Row]:
    """Return the rows of one trace."""
    first, second = write_halves(name, folder, limit)
    shared = ("buckets", "--trace", str(second), "--json", *limits)
    rows = [row_of(name, "exponential", json.loads(command(*shared, "--strategy", "exponential")))]
    for budget in BUDGETS:
        table = folder / f"{name}_{budget}.txt"
        command("buckets", "fit", "--trace", str(first), "--max-graphs", str(budget), "-o", str(table), *limits)
        found = command(*shared, "--strategy", "from_file", "--bucketing.from_file.path", str(table))
        rows.append(row_of(name, f"fitted, {budget}", json.loads(found)))
    return rows


def row_of(trace: str, table: str, report: dict[str, Any]) -> Row:
    """Return the row of a report of `trencadis buckets`."""
    measured = report["report"]
    keys = ("warmup_s", "prompt_padding", "decode_padding", "time_padding")
    return Row(
        trace=trace, table=table, buckets=measured["num_buckets"], **{key: round(measured[key], 4) for key in keys}
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N requests of each trace")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for name, limits in TRACES.items() for row in measure(name, limits, Path(folder), args.limit)]
    if args.json:
        args.json.write_text(json.dumps([attrs.asdict(row) for row in rows], indent=1) + "\n")
    print_table(
        ("trace", "table", "buckets", "warm-up s", "prompt padding", "decode padding", "time padding"),
        [
            (
                row.trace,
                row.table,
                f"{row.buckets}",
                f"{row.warmup_s:.1f}",
                *(f"{value:.1%}" for value in (row.prompt_padding, row.decode_padding, row.time_padding)),
            )
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
