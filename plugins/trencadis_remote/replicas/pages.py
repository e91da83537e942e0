"""Metrics of several engines as one page: each sample with the number of its replica, families once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["merge_pages", "replicas_page"]

_HEADER = re.compile(r"# (?:HELP|TYPE) (\S+)")
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?(\s.*)", re.DOTALL)


def merge_pages(pages: Mapping[int, str]) -> str:
    """Return one page of what replicas show, in Prometheus' text format. Pure.

    Args:
        pages: By replica; each a page that a scraper reads.
    """
    headers: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, page in pages.items():
        family = ""
        for line in page.splitlines():
            if header := _HEADER.match(line):
                family = header[1]
                lines = headers.setdefault(family, [])
                if line not in lines and len(lines) < 2:
                    lines.append(line)
            elif sample := _SAMPLE.fullmatch(line):
                name, labels, value = sample.groups()
                if not family or not name.startswith(family):
                    family = name
                both = f'replica="{replica}",{labels}' if labels else f'replica="{replica}"'
                samples.setdefault(family, []).append(f"{name}{{{both}}}{value}")
    parts = [line for family in samples for line in (*headers.get(family, ()), *samples[family])]
    return "\n".join(parts) + "\n" if parts else ""


_FAMILIES: tuple[tuple[str, str, str, Callable[[Mapping[str, Any]], float]], ...] = (
    ("trencadis_replica_up", "gauge", "1 while the replica takes requests.", lambda row: row["state"] == "ready"),
    ("trencadis_replica_live_requests", "gauge", "Requests and texts that it has.", lambda row: row["num_live"]),
    ("trencadis_replica_requests_total", "counter", "Requests and texts given to it.", lambda row: row["num_placed"]),
    (
        "trencadis_replica_moved_total",
        "counter",
        "Of these, moved to others as it ended.",
        lambda row: row["num_moved"],
    ),
    (
        "trencadis_replica_rebalanced_total",
        "counter",
        "Of these, moved to others by the router while it served.",
        lambda row: row["num_rebalanced"],
    ),
    ("trencadis_replica_restarts_total", "counter", "Times it was started again.", lambda row: row["num_restarts"]),
)


def replicas_page(rows: Iterable[Mapping[str, Any]], *, num_quarantined: int, num_refused_moves: int = 0) -> str:
    """Return what the client of replicas counts itself, in Prometheus' text format. Pure.

    Args:
        rows: State of each replica, as the control request ``replicas`` shows it.
        num_quarantined: Routers that were replaced.
        num_refused_moves: Moves that a router asked for and that were not made.
    """
    lines, listed = [], list(rows)
    for name, kind, text, value in _FAMILIES:
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [f'{name}{{replica="{row["replica"]}"}} {float(value(row))}' for row in listed]
    name = "trencadis_quarantined_routers"
    lines += [f"# HELP {name} Routers that failed since the start and were replaced.", f"# TYPE {name} gauge"]
    lines.append(f"{name} {float(num_quarantined)}")
    name = "trencadis_refused_moves_total"
    lines += [f"# HELP {name} Moves that the router asked for and that were not made.", f"# TYPE {name} counter"]
    return "\n".join([*lines, f"{name} {float(num_refused_moves)}"]) + "\n"
