"""Findings of one check, as tuples that read well in a test."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from collections.abc import Callable
from importlib.metadata import EntryPoint

import pytest

from trencadis.doctor import Findings


@pytest.fixture
def found() -> Findings:
    """Nothing yet."""
    return Findings()


@pytest.fixture
def told(found: Findings) -> Callable[[], list[tuple[str, str]]]:
    """Returns severity and message of all findings."""
    return lambda: [(item.severity.value, item.message) for item in found]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the given modules the only plugins that are installed."""

    def install(*modules: types.ModuleType) -> None:
        points = []
        for module in modules:
            monkeypatch.setitem(sys.modules, module.__name__, module)
            points.append(EntryPoint(name=module.__name__, value=module.__name__, group="trencadis"))
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: list(points))

    return install
