"""Plugins made in a test: modules in memory, and packages with their own distribution for entry points."""

from __future__ import annotations

import importlib
import sys
import types
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from typing import Any

import pytest

from support.nouns import HOOKS
from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, Observer, SchedulingPolicy


def _component(name: str, **changes: Any) -> Component:
    return Component(
        **{"name": name, "factory": lambda config, context: None, "summary": "Of a test.", "interface_version": 1}
        | changes
    )


def _plugin(name: str = "test_plugin", **components: Any) -> types.ModuleType:
    plugin = types.ModuleType(name)
    for noun, items in components.items():
        found = tuple(_component(item) if isinstance(item, str) else item for item in items)
        setattr(plugin, HOOKS[noun], hookimpl(specname=HOOKS[noun])(lambda found=found: iter(found)))
    return plugin


@pytest.fixture
def component():
    """Returns a function: a component by name, with changes."""
    return _component


@pytest.fixture
def make_plugin():
    """Returns a function: a module that yields components, ``noun=["name", Component(...)]``."""
    return _plugin


@pytest.fixture
def house():
    """A plugin with every component that the default configuration names."""
    return _plugin(
        "house",
        bucketing=["exact", "exponential"],
        scheduling=[
            _component(name, factory=lambda config, context: SchedulingPolicy()) for name in ("fair_share", "fcfs")
        ],
        eviction=["lru"],
        sampling=["standard"],
        draft_length=["goodput"],
        acceptance=["match"],
        backend=["torch"],
        executor=[_component("inline", interface_version=1)],
        observer=[_component("log", factory=lambda config, context: Observer())],
    )


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Returns a function: write a package with its distribution and return its entry points."""
    monkeypatch.syspath_prepend(str(tmp_path))
    installed: list[str] = []

    def install(
        distribution: str, version: str, source: str, *, name: str = "tiles", module: str = ""
    ) -> list[EntryPoint]:
        module = module or distribution.replace("-", "_")
        installed.append(module)
        (tmp_path / f"{module}.py").write_text(source, encoding="utf-8")
        info = tmp_path / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[trencadis]\n{name} = {module}\n")
        (info / "RECORD").write_text(f"{module}.py,,\n")
        importlib.invalidate_caches()
        return list(Distribution.at(info).entry_points)

    yield install
    for module in installed:
        sys.modules.pop(module, None)


PLUGIN_SOURCE = """
from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component

@hookimpl
def trencadis_bucketings():
    yield Component(name="{name}", factory=lambda config, context: None, summary="Of a package.", interface_version=1)
"""


@pytest.fixture
def plugin_source():
    """Returns a function: source of a module that offers a bucketing of this name."""
    return lambda name: PLUGIN_SOURCE.format(name=name)
