"""The engine of a replay: the recorded configuration and plugins, without device, observers and texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from trencadis.api import Config, ConfigFile, Engine, Registry, build_engine, load_with_plugins
from trencadis.clock import SimulatedClock
from trencadis.errors import ConfigError, InternalError
from trencadis.interfaces import PendingStep
from trencadis.records import Plan, Request
from trencadis.records.flight_record import FlightRecord
from trencadis_tools.replay.replay_executor import PlannedStep, ReplayExecutor
from trencadis_tools.replay.stand_ins import StandIns

__all__ = ["ScriptedClock", "check_replayable", "recorded_config", "replayed_engine"]

_FOR_EVER = 2**62


class ScriptedClock(SimulatedClock):
    """A clock that is set to what was recorded."""

    def set(self, now_s: float) -> None:
        """Show another moment from now on."""
        self._now_s = now_s


def check_replayable(record: FlightRecord, *, name: str) -> None:
    """Refuse a record that the same engine does not make again.

    Args:
        record: The record.
        name: Of its file, for messages.

    Raises:
        ConfigError: It cannot be replayed; says why.
    """
    if record.obstacles:
        raise ConfigError(
            f"{name} cannot be replayed: {'; '.join(record.obstacles)}.",
            hint="Look at its steps with trencadis replay --show.",
        )


def recorded_config(record: FlightRecord, flags: list[str] | None = None) -> tuple[Config, Registry]:
    """Return the recorded configuration, and the plugins that it names.

    Args:
        record: The record.
        flags: Changes, as flags of the command line.

    Raises:
        ConfigError: A table or a flag is wrong here.
        PluginError: A plugin is not installed, or cannot be used.
    """
    tables = {name: table for name, table in record.config.items() if name != "plugins"}
    recorded = ConfigFile(tables, name="the record")
    resolved, registry = load_with_plugins(file=recorded, environ={}, flags=flags or ())
    return resolved.config, registry


def replayed_engine(
    record: FlightRecord, config: Config, registry: Registry, *, clock: SimulatedClock, executor: ReplayExecutor
) -> Engine:
    """Return an engine of the recorded sizes.

    Args:
        record: The record.
        config: Of :func:`recorded_config`.
        registry: Of the same.
        clock: Its time.
        executor: Its device.

    Raises:
        TrencadisError: It cannot be built.
    """
    sizes = config.parallel
    num_partitions = sizes.tensor if sizes.attention == "data" else 1
    config = attrs.evolve(
        config,
        model=attrs.evolve(config.model, path="demo", max_model_len=record.max_model_len),
        cache=attrs.evolve(config.cache, num_blocks=record.num_blocks // num_partitions, block_size=record.block_size),
        observer=attrs.evolve(config.observer, names=()),
        flight_recorder=attrs.evolve(config.flight_recorder, num_steps=_FOR_EVER, max_bytes=_FOR_EVER),
    )
    engine = build_engine(config, registry=registry, clock=clock, executor=executor)
    if not isinstance(engine, Engine):
        raise InternalError("an engine that records steps generates")
    return engine


def restore(
    engine: Engine, frame: Mapping[str, Any], stand_ins: StandIns, executor: ReplayExecutor, **options: bool
) -> None:
    """Put an engine, and its device, into the state in which a record begins.

    Args:
        engine: Just built.
        frame: Of the record.
        stand_ins: Its requests.
        executor: The engine's.
        options: ``restores_scheduling``, ``restores_eviction``: see ``Engine.restore``.
    """
    rows = frame["table"]["row"]
    number_of_slot = {
        values["slot"]: number for number, values in zip(frame["requests"], frame["sequences"], strict=True)
    }
    for slot, number in number_of_slot.items():
        if rows[slot] >= 0:
            executor.number_of_row[int(rows[slot])] = number
    requests: dict[int, Request] = {}

    def request_of(number: int) -> Request:
        if number not in requests:
            requests[number] = stand_ins.request(number)
        return requests[number]

    def pending(plan: Plan) -> PendingStep:
        # Who has left meanwhile gets no token; any number stands for it.
        numbers = tuple(number_of_slot.get(slot, 0) for slot in plan.slots.tolist())
        num_drafts = 0 if plan.drafts is None else plan.drafts.num_drafts
        known = plan.starts + plan.num_scheduled - num_drafts
        return executor.pending(PlannedStep(plan.step, numbers, known, plan.samples.astype(np.int32)), None)

    engine.restore(frame, request_of=request_of, tokens_of=stand_ins.tokens.__getitem__, pending=pending, **options)
