"""A command line over plugins of the test, whatever is installed."""

from __future__ import annotations

import types
from collections.abc import Callable

import attrs
import pytest

import trencadis_kv
import trencadis_server
import trencadis_tools
from support.nouns import HOOKS
from support.only_installed import only_installed
from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component

NAMES = {
    "bucketing": ("exact", "exponential"),
    "scheduling": ("fair_share", "fcfs", "other"),
    "eviction": ("lru",),
    "sampling": ("standard",),
    "draft_length": ("goodput",),
    "acceptance": ("match",),
    "kv_codec": ("none",),
    "kv_policy": ("cost_aware",),
    "router": ("prefix_affinity",),
    "backend": ("torch",),
    "executor": ("inline",),
    "observer": ("log",),
}


@attrs.frozen(kw_only=True)
class ExponentialConfig:
    """Table ``[bucketing.exponential]``: sizes that double."""

    limit: int = attrs.field(default=0, metadata={"help": "Most sizes.", "unit": "sizes"})
    max_batch_size: int = 8
    exact: bool = False


def _component(noun: str, name: str) -> Component:
    config = {"config": ExponentialConfig} if name == "exponential" else {}
    provides = {"backend.graphs"} if noun == "backend" else set()
    return Component(
        name=name,
        factory=lambda config, context: None,
        summary=f"The {name} one.",
        interface_version=1,
        provides=provides,
        **config,
    )


@pytest.fixture
def plugin() -> types.ModuleType:
    """A plugin with what the default configuration names."""
    module = types.ModuleType("cli_test_plugin")
    for noun, names in NAMES.items():
        found = [_component(noun, name) for name in names]
        setattr(module, HOOKS[noun], hookimpl(specname=HOOKS[noun])(lambda found=found: found))
    return module


@pytest.fixture
def installed(plugin: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[[types.ModuleType], None]:
    """The plugin is installed and packages with commands are, nothing else; the value installs another module under its name."""
    modules = [plugin, trencadis_kv, trencadis_server, trencadis_tools]
    only_installed(monkeypatch, modules, name="house")
    for name in ("TRENCADIS_CONFIG", "TRENCADIS_BLOCKED_PLUGINS"):
        monkeypatch.delenv(name, raising=False)

    def add(module: types.ModuleType) -> None:
        modules.append(module)
        only_installed(monkeypatch, modules, name="house")

    return add


@pytest.fixture
def broken_plugin(installed: Callable[[types.ModuleType], None]) -> None:
    """A plugin that cannot be used is installed as well."""
    broken = types.ModuleType("broken")
    broken.trencadis_bucketings = lambda: ()
    installed(broken)
