"""Tools for operators, plugin authors and researchers."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Command, CommandGroup, Component, ComponentContext, StageDefinition
from trencadis.interfaces.kv_connector import INTERFACE_VERSION
from trencadis_tools.simulated_store.config import SimulatedStoreConfig

if TYPE_CHECKING:
    from trencadis.interfaces import ConnectorPair

__all__ = ["trencadis_check_lock", "trencadis_commands", "trencadis_kv_connectors", "trencadis_stages"]

_COMMANDS = {
    CommandGroup.LOOKING: {
        "doctor": "Check the installation, the configuration and every plugin, and say how to mend what is wrong.",
    },
    CommandGroup.OPERATING: {
        "warmup": "Prepare every bucket, report buckets, graphs, time and memory, and count what a few requests still compile.",
        "buckets": "Print the bucket tables of strategies, and what they cost on a trace; or fit one to it.",
        "layout": "Print how a model can be divided over devices, what each layout needs and sends, and which one to take.",
        "lock": "Write down plugins, versions, files and options of this configuration, for --locked; or list what has changed.",
        "expert-loads": "Write the file of experts' loads that [backend.torch] expert_loads names, from a page of metrics.",
    },
    CommandGroup.LABORATORY: {
        "compare": "Run configurations on the same requests, simulated or measured, and say which is better, by how much, and where not.",
        "simulate": "Serve a workload on simulated replicas, from one to thousands, and print latencies, throughput, prefix hits and loads.",
        "replay": "Make the schedule of a flight record again, step for step, or serve its requests with other settings.",
        "tune": "Find the configuration that carries the largest rate of a workload within objectives, and measure it.",
        "bench": "Measure the throughput of this configuration, drafters, KV connectors, or policies on a trace.",
        "workload": "Print what a workload is in numbers, list those that come with the package, or write one as JSON lines.",
    },
    CommandGroup.WRITING: {
        "new-plugin": "Write a new plugin package that installs and passes its tests as it is.",
    },
}
"""Summary of each command by group and name, which is also the name of its module."""


@hookimpl
def trencadis_commands() -> Iterable[Command]:
    """Yield the commands of the table above."""
    for group, commands in _COMMANDS.items():
        for name, summary in commands.items():
            module = f"trencadis_tools.commands.{name.replace('-', '_')}"
            load = partial(importlib.import_module, module)
            yield Command(name=name, summary=summary, group=group, load=load)


@hookimpl
def trencadis_check_lock(file: Path, config: Any, registry: Any) -> None:
    """Compare with a file of ``trencadis lock``."""
    from trencadis_tools.lock import check_lock

    check_lock(file, config, registry)


@hookimpl
def trencadis_stages() -> Iterable[StageDefinition]:
    """Yield ``flight_recorder``."""
    yield StageDefinition(
        name="flight_recorder",
        make=_make_recorder,
        summary="Keeps the last steps, to be written when something goes wrong and replayed.",
        before=frozenset({"defragmenter", "swap", "transfer"}),
    )


def _make_recorder(makings: Any) -> Any:
    from trencadis_tools.recorder.flight_recorder import make_recorder

    return make_recorder(makings)


@hookimpl
def trencadis_kv_connectors() -> Iterable[Component]:
    """Yield ``simulated_store``."""
    yield Component(
        name="simulated_store",
        factory=_make_simulated_store,
        config=SimulatedStoreConfig,
        summary="A store beside simulated replicas, shared or one each: its size and its links, without bytes.",
        interface_version=INTERFACE_VERSION,
        stability="experimental",
    )


def _make_simulated_store(config: SimulatedStoreConfig, context: ComponentContext) -> ConnectorPair:
    from trencadis_tools.simulated_store.connector import make_simulated_store

    return make_simulated_store(config, context)
