"""Metrics of several engines as one page: each sample with the number of its replica, families once."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["merge_pages"]

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
