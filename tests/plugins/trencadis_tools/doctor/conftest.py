"""Findings of one check, as tuples that read well in a test."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest

from support.only_installed import only_installed
from trencadis_tools.doctor import Findings


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
        only_installed(monkeypatch, modules)

    return install
