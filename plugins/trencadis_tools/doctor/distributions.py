"""Distributions on disk: installed twice, moved away, or installed before their entry points last changed."""

from __future__ import annotations

import importlib.metadata
import json
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from trencadis.hookspecs import PROJECT_NAME
from trencadis_tools.doctor.findings import Findings

__all__ = ["check_distributions"]


def check_distributions(found: Findings, distributions: Iterable[Distribution] | None = None) -> None:
    """Check the distribution of Trencadís, and every one that offers a plugin.

    Args:
        found: Findings to add to.
        distributions: Distributions to check; None: all that are installed.
    """
    by_name: defaultdict[str, dict[str, Distribution]] = defaultdict(dict)
    for item in importlib.metadata.distributions() if distributions is None else distributions:
        if _concerns_us(item):
            by_name[_tidy(item.name)].setdefault(_home(item), item)
    for homes in by_name.values():
        item = next(iter(homes.values()))
        if len(homes) > 1:
            copies = "; ".join(f"{copy.version} in {home}" for home, copy in homes.items())
            found.fail(
                f"{item.name} is installed {len(homes)} times: {copies}; the first one hides the others",
                f"Run pip uninstall {item.name} until it says that it is not installed, then install it once.",
            )
        else:
            _check_one(found, item)


def _check_one(found: Findings, item: Distribution) -> None:
    where = _editable_home(item)
    if where is None:
        found.ok(f"{item.name} {item.version}, {_num_entry_points(item)} plugins")
        return
    project = where / "pyproject.toml"
    if not project.is_file():
        found.fail(
            f"{item.name} {item.version} is installed from {where}, where there is no pyproject.toml any more",
            f"Run pip uninstall {item.name}, or pip install -e in the folder it was moved to.",
        )
        return
    stale = _stale_entry_points(item, tomllib.loads(project.read_text(encoding="utf-8")))
    if stale:
        found.warn(
            f"{item.name}: pyproject.toml of {where} has other plugins than what is installed: {', '.join(stale)}",
            f"Run pip install -e {where} again.",
        )
        return
    found.ok(f"{item.name} {item.version}, {_num_entry_points(item)} plugins, editable from {where}")


def _stale_entry_points(item: Distribution, project: Mapping[str, Any]) -> list[str]:
    """Return the names of entry points that differ between the installed metadata and ``pyproject.toml``."""
    declared: Mapping[str, str] = project.get("project", {}).get("entry-points", {}).get(PROJECT_NAME, {})
    installed = {point.name: point.value for point in item.entry_points if point.group == PROJECT_NAME}
    return sorted(name for name in {*declared, *installed} if declared.get(name) != installed.get(name))


def _editable_home(item: Distribution) -> Path | None:
    """Return the source folder of an editable installation, or None. Source: PEP 610."""
    text = item.read_text("direct_url.json")
    if text is None:
        return None
    origin = json.loads(text)
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlsplit(origin["url"]).path))


def _concerns_us(item: Distribution) -> bool:
    name = item.metadata["Name"] if item.metadata is not None else None
    return bool(name) and (_tidy(name) == PROJECT_NAME or _num_entry_points(item) > 0)


def _num_entry_points(item: Distribution) -> int:
    return sum(point.group == PROJECT_NAME for point in item.entry_points)


def _home(item: Distribution) -> str:
    return str(Path(str(item.locate_file(""))).resolve())


def _tidy(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
