"""Pages of the gallery, and the results that they show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "page_of", "results_of"]

ROOT = Path(__file__).parents[3]


def page_of(name: str) -> str:
    """Return the text of a page."""
    return (ROOT / "docs" / "gallery" / f"{name}.md").read_text(encoding="utf-8")


def results_of(name: str) -> Any:
    """Return results that are kept."""
    return json.loads((ROOT / "benchmarks" / "results" / "gallery" / f"{name}.json").read_text(encoding="utf-8"))
