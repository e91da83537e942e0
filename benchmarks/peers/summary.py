"""Medians, ratios and shares of the limit, from the records of all runs. Pure.

Two engines are compared in the same round of the same group only. Ratios are of tokens per CPU second unless said otherwise.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from peers.catalogue import OURS, PUBLISHED
from peers.shapes import SHAPES, Ceilings, decode_limit_s, prefill_limit_s
from peers.workloads import Workload, workload_of

__all__ = ["rows_of", "spread", "starts_of"]

WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 18 / 32, PUBLISHED: 0.94}
"""Of a weight; int4 has a scale of two bytes for each 32 weights, the published file 253 MB for 268 M, most of them embeddings."""
MULTIPLIED = {"fp32": "fp32", "bf16": "fp32", "int8": "int8", "int4": "int8", PUBLISHED: "int8"}
"""Which product's rate bounds a precision: bf16 weights are multiplied in fp32, int4 ones as int8."""

Record = Mapping[str, Any]


def spread(values: Iterable[float]) -> dict[str, float]:
    """Return median and quartiles (inclusive, so that two values have their own between them), and how many there were.

    Raises:
        statistics.StatisticsError: No value.
    """
    found = sorted(values)
    if len(found) == 1:
        return {"median": found[0], "low": found[0], "high": found[0], "num": 1}
    low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high, "num": len(found)}


def rows_of(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row for each model, precision, workload and engine that has runs, in the order in which they were measured."""
    runs: Sequence[Record] = results["runs"]
    kinds = dict.fromkeys((run["model"], run["precision"], run["workload"], run["engine"]) for run in runs)
    return [_row(kind, results) for kind in kinds]


def _row(kind: tuple[str, str, str, str], results: Mapping[str, Any]) -> dict[str, Any]:
    model, precision, workload_name, engine = kind
    workload = workload_of(workload_name, is_short=bool(results["settings"].get("quick")))
    same = [run for run in results["runs"] if (run["model"], run["precision"], run["workload"]) == kind[:3]]
    mine = [run for run in same if run["engine"] == engine]
    ours = {_round(run): run for run in same if run["engine"] == OURS}
    pairs = [(run, ours[_round(run)]) for run in mine if _round(run) in ours]
    num_tokens = workload.num_counted_tokens
    row: dict[str, Any] = {
        "model": model,
        "precision": precision,
        "workload": workload_name,
        "engine": engine,
        "tokens_per_s": spread(num_tokens / run["wall_s"] for run in mine),
        "tokens_per_cpu_s": spread(num_tokens / run["cpu_s"] for run in mine),
        "cpu_s_per_token": spread(run["cpu_s"] / num_tokens for run in mine),
        "peak_rss": max(run["peak_rss"] for run in mine),
        # Ours by theirs: above 1, ours does more in the same time.
        "ratio": spread(run["cpu_s"] / other["cpu_s"] for run, other in pairs) if pairs else None,
        "wall_ratio": spread(run["wall_s"] / other["wall_s"] for run, other in pairs) if pairs else None,
        "share": _share(mine, workload, results["ceilings"], "cpu_s", "per_cpu_s"),
        "wall_share": _share(mine, workload, results["ceilings"], "wall_s", "per_s"),
    }
    if held := [run for run in mine if "first_ratio" in run]:  # none without a reference beside it
        row |= {name: statistics.fmean(run[name] for run in held) for name in ("first_ratio", "leading_ratio")}
        row["num_equal"] = row["leading_ratio"] * workload.output_len
    return row


def _round(record: Record) -> tuple[Any, ...]:
    return tuple(record[name] for name in ("model", "precision", "group", "round"))


def _share(
    runs: Sequence[Record], workload: Workload, ceilings: Sequence[Record], time: str, rate: str
) -> dict[str, float] | None:
    """Return the limit by the time taken: of prefill, or of the decode steps after the first token."""
    rates = {_round(record): record for record in ceilings}
    shares = []
    for run in runs:
        found = rates.get(_round(run))
        if found is None or MULTIPLIED[run["precision"]] not in found:
            continue
        machine = Ceilings(read=found["read"][rate], multiply=found[MULTIPLIED[run["precision"]]][rate])
        shape, size = SHAPES[run["model"]], WEIGHT_BYTES[run["precision"]]
        if workload.is_prefill:
            limit_s = prefill_limit_s(
                shape, machine, weight_bytes=size, num_sequences=workload.num_requests, prompt_len=workload.prompt_len
            )
            taken_s = run[time]
        else:
            limit_s = decode_limit_s(
                shape,
                machine,
                weight_bytes=size,
                num_sequences=workload.num_requests,
                context_len=workload.prompt_len + 1,
                num_steps=workload.output_len - 1,
            )
            taken_s = run[time] - run[f"first_{time}"]
        if taken_s > 0:  # noise can make the first tokens alone take longer than all
            shares.append(limit_s / taken_s)
    return spread(shares) if shares else None


def starts_of(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return, by model, precision, engine and files in memory, medians of the times from nothing to the first token, and memory then."""
    names = ("model", "precision", "engine", "files")
    starts: Sequence[Record] = results["starts"]
    rows = []
    for kind in dict.fromkeys(tuple(start[name] for name in names) for start in starts):
        mine = [start for start in starts if tuple(start[name] for name in names) == kind]
        medians = {
            name: statistics.median(start[name] for start in mine) for name in ("wall_s", "cpu_s", "rss", "peak_rss")
        }
        rows.append({**dict(zip(names, kind, strict=True)), **medians})
    return rows
