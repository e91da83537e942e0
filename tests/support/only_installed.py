"""Plugins of a test in the place of those that are installed."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from collections.abc import Sequence
from importlib.metadata import EntryPoint

import pytest

__all__ = ["only_installed"]

GROUP = "trencadis"
_REAL = importlib.metadata.entry_points


def only_installed(monkeypatch: pytest.MonkeyPatch, modules: Sequence[types.ModuleType], *, name: str = "") -> None:
    """Make modules the only plugins that are installed.

    Other groups are as they are: torch asks for its own while it is imported, and what is imported by halves cannot be imported again.
    """
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    names = [name or modules[0].__name__, *[module.__name__ for module in modules[1:]]] if modules else []
    points = [
        EntryPoint(name=one, value=module.__name__, group=GROUP) for one, module in zip(names, modules, strict=True)
    ]
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda *, group: points if group == GROUP else _REAL(group=group)
    )
