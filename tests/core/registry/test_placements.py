from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from trencadis.client.factory import open_frontend, open_runner
from trencadis.errors import ComponentConflictError, ConfigValueError, ContractError
from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Placement
from trencadis.registry import Registry, load_with_plugins
from trencadis.registry.startup import find_placement


class Offers:
    """A plugin with placements."""

    def __init__(self, *placements: object) -> None:
        self._placements = placements

    @hookimpl
    def trencadis_placements(self) -> Any:
        return self._placements


class Other(Offers):
    """The same, of another plugin."""


def pod(name: str = "pod") -> Placement:
    module = SimpleNamespace(open_frontend=lambda *_, **__: "frontend", open_runner=lambda *_: "runner")
    return Placement(name=name, summary="In a pod.", load=lambda: module)  # type: ignore[arg-type,return-value]


def registry_of(*plugins: object) -> Registry:
    return Registry.discover(entry_points=(), extra_plugins=plugins)


def test_an_engine_is_opened_where_the_placement_of_a_plugin_says() -> None:
    resolved, registry = load_with_plugins(
        environ={}, overrides={"engine": {"placement": "pod"}}, extra_plugins=[Offers(pod())], entry_points=()
    )
    assert open_frontend(resolved.config, registry) == "frontend"
    assert open_runner(resolved.config, registry) == "runner"


@pytest.mark.parametrize("name", ["auto", "thread"])
def test_this_process_needs_no_plugin(name: str) -> None:
    assert find_placement(registry_of(), name) is None


def test_a_placement_that_nobody_offers_is_refused_with_those_that_there_are() -> None:
    overrides = {"engine": {"placement": "pid"}}
    with pytest.raises(
        ConfigValueError, match=r'"pid" \(from argument\): did you mean "pod"\? .*one of: auto, thread, pod'
    ):
        load_with_plugins(environ={}, overrides=overrides, extra_plugins=[Offers(pod())], entry_points=())


def test_two_plugins_cannot_offer_one_placement() -> None:
    with pytest.raises(ComponentConflictError, match='Two plugins offer the placement "pod"'):
        find_placement(registry_of(Offers(pod()), Other(pod())), "pod")


@pytest.mark.parametrize(
    ("offered", "said"), [("pod", "Placement is expected"), (pod("thread"), "is one of trencadis itself")]
)
def test_what_is_no_placement_is_refused(offered: object, said: str) -> None:
    with pytest.raises(ContractError, match=said):
        find_placement(registry_of(Offers(offered)), "pod")


def test_an_engine_in_this_process_imports_nothing_of_engines_elsewhere() -> None:
    code = """
import asyncio, sys
from trencadis import LLM, AsyncLLM

async def close():
    async with AsyncLLM("demo", engine={"warmup": False}):
        pass

with LLM("demo", engine={"warmup": False}):
    pass
asyncio.run(close())
print([name for name in sys.modules if name.startswith("trencadis_remote")])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
