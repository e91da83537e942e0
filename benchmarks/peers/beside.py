"""Runs on several machines, or with instructions hidden, side by side. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peers.catalogue import ENGINES, OWN

__all__ = ["best_ratios", "machine_in_words", "short_name", "side_by_side"]

Results = Mapping[str, Any]
Kind = tuple[str, str, str]
WIDE = "avx512f"


def machine_in_words(results: Results) -> str:
    """Return processor, cores, memory, threads, load and time of a run."""
    machine, settings = results["machine"], results["settings"]
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, {machine['system']}; "
        f"{settings['threads']} threads each; load before {machine['load']:.1f}; {results['finished']}."
    )


def short_name(results: Results) -> str:
    """Return which instructions a run had."""
    if mask := results["settings"].get("instructions"):
        return f"{mask.upper()}, by hiding the rest"
    return "AVX-512" if WIDE in results["machine"].get("flags", ()) else "AVX2"


def best_ratios(results: Results) -> dict[Kind, tuple[str, float]]:
    """Return, by model, precision and workload, the best peer and our tokens per CPU second by its."""
    found: dict[Kind, tuple[str, float]] = {}
    for row in results["rows"]:
        kind = (row["model"], row["precision"], row["workload"])
        if row["engine"] in OWN or not row["ratio"]:
            continue
        ratio = row["ratio"]["median"]
        if kind not in found or ratio < found[kind][1]:
            found[kind] = (row["engine"], ratio)
    return found


def side_by_side(runs: Sequence[Results]) -> tuple[list[str], list[list[str]]]:
    """Return head and lines of a table with a column for each run: our tokens per CPU second by the best peer's, and who that is."""
    columns = [best_ratios(run) for run in runs]
    kinds = dict.fromkeys(kind for column in columns for kind in column)
    lines = [[*kind, *(_cell(column.get(kind)) for column in columns)] for kind in kinds]
    return [
        "model",
        "precision",
        "workload",
        *(f"{short_name(run)} ({run['machine']['processor']})" for run in runs),
    ], lines


def _cell(best: tuple[str, float] | None) -> str:
    return "" if best is None else f"{best[1]:.2f} ({ENGINES[best[0]].label})"
