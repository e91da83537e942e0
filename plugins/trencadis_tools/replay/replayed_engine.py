"""Engine of a replay: recorded configuration and plugins, without device, observers and texts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import msgspec
import numpy as np

from trencadis.api import (
    Config,
    ConfigFile,
    Engine,
    Registry,
    SchedulingChange,
    SchedulingInForce,
    build_engine,
    load_with_plugins,
    resolve_change,
    resolve_plan,
)
from trencadis.clock import SimulatedClock
from trencadis.errors import ConfigError, ImportPathRefusedError, InternalError, TrencadisError
from trencadis.faults import as_words
from trencadis.interfaces import PendingStep
from trencadis.records import Plan, Request
from trencadis_tools.recorder.flight_record import ComponentCode, FlightRecord, RecordedChange
from trencadis_tools.recorder.flight_recorder import FlightRecorder
from trencadis_tools.replay.replay_executor import PlannedStep, ReplayExecutor
from trencadis_tools.replay.synthetic_requests import SyntheticRequests

__all__ = [
    "ScriptedClock",
    "as_of_a_record",
    "change_scheduling",
    "changes_of",
    "check_code",
    "check_replayable",
    "recorded_config",
    "recorder_of",
    "replayed_engine",
    "restore",
    "table_of",
]

_FOR_EVER = 2**62
_MAX_EXPLAINED = 1000

_TABLES = (
    *("engine", "cache", "defragmenter", "parallel", "budget"),
    *("backend", "executor"),  # neither is built; layouts are checked by the names of components
    *("scheduling", "bucketing", "eviction", "speculation", "draft_length", "acceptance"),
)
"""Configuration tables that plans depend on; a replay takes no other table from a record (no model, paths or connectors)."""

_COMPARED = ("scheduling", "bucketing", "eviction", "speculation", "draft_length", "acceptance")
_VARIABLES_OF_PLUGINS = ("TRENCADIS_BLOCKED_PLUGINS", "TRENCADIS_PLUGINS__")
_MAX_STEP_TOKENS = 2**24
_MAX_ROW_BLOCKS = 2**28
"""Maximum entries of the block table, sequences × blocks of each."""


class ScriptedClock(SimulatedClock):
    """Clock that is set to recorded times."""

    def set(self, now_s: float) -> None:
        """Set the time, seconds."""
        self._now_s = now_s


def check_replayable(record: FlightRecord, *, name: str) -> None:
    """Refuse a record that the same engine cannot reproduce.

    Args:
        record: Record to check.
        name: Name of the record's file, for messages.

    Raises:
        ConfigError: The record cannot be replayed; the message says why.
    """
    if record.obstacles:
        raise ConfigError(
            f"{name} cannot be replayed: {'; '.join(record.obstacles)}.",
            hint="Look at its steps with trencadis replay --show.",
        )


def recorded_config(
    record: FlightRecord,
    flags: list[str] | None = None,
    *,
    name: str,
    may_import: bool = False,
    plugins: Mapping[str, Any] | None = None,
) -> tuple[Config, Registry]:
    """Return the part of the recorded configuration that a replay depends on, and the installed plugins.

    Args:
        record: Record with the configuration.
        flags: Changes by the operator, as flags of the command line.
        name: Name of the record's file, for messages.
        may_import: Whether the file is trusted, so that import paths in it are followed.
        plugins: Operator's own table ``[plugins]``; that of the record is ignored.

    Raises:
        ImportPathRefusedError: The record names code to import, and is not trusted.
        ConfigError: A table or a flag is not valid here.
        PluginError: A plugin is not installed, or cannot be used.
    """
    tables = {table: record.config[table] for table in _TABLES if table in record.config}
    recorded = ConfigFile(tables, name=name, may_import=may_import)
    with _saying_how_to_trust(name):
        resolved, registry = load_with_plugins(
            file=recorded,
            environ={key: text for key, text in os.environ.items() if key.startswith(_VARIABLES_OF_PLUGINS)},
            flags=flags or (),
            overrides={"plugins": dict(plugins)} if plugins else None,
        )
    return resolved.config, registry


def check_code(
    record: FlightRecord, config: Config, registry: Registry, *, name: str, may_import: bool = False
) -> None:
    """Refuse a record whose components differ from those installed here, in name or code.

    Args:
        record: Record to check.
        config: Configuration from :func:`recorded_config`.
        registry: Plugins from :func:`recorded_config`.
        name: Name of the record's file, for messages.
        may_import: Whether the file is trusted, so that differences are allowed.

    Raises:
        ImportPathRefusedError: A change in the record names code to import, and the file is not trusted.
        ConfigError: Something differs, and the file is not trusted; or a change cannot be read.
        PluginError: A component is not installed.
    """
    layout = str(record.capabilities.get("layout"))
    plan = resolve_plan(config, registry).resolve_bucketing(layout)
    present = SchedulingInForce.at_start(config, plan)
    pairs = [(record.components, plan.code_of(*_COMPARED))]
    with _saying_how_to_trust(name):
        for change in changes_of(record):
            asked = SchedulingChange.of(table_of(change, name), source=name, may_import=may_import)
            present = resolve_change(present, registry, asked)
            pairs.append((change.components, present.plan.code_of("scheduling")))
    differing = [
        f"{path} is {_words(now)} here, and {_words(recorded.get(path))} in the record"
        for recorded, here in pairs
        for path, now in here.items()
        if recorded.get(path) != now
    ]
    if differing and not may_import:
        listed = "".join(f"\n  {line}" for line in dict.fromkeys(differing))
        raise ConfigError(
            f"{name} was made with other components than are installed here:{listed}\n",
            hint="Install those; or replay with what is here, which may plan otherwise: add --trust.",
        )


def changes_of(record: FlightRecord) -> list[RecordedChange]:
    """Return the changes of scheduling in a record, first the one in force at its beginning, if any. Pure."""
    before = [] if record.scheduling is None else [record.scheduling]
    return before + [event for event in record.events if isinstance(event, RecordedChange)]


def change_scheduling(engine: Engine, change: RecordedChange, *, name: str, may_import: bool) -> None:
    """Apply a recorded change of scheduling.

    Args:
        engine: Engine of the replay.
        change: Change, checked by :func:`check_code`.
        name: Name of the record's file, for messages.
        may_import: Whether the file is trusted.

    Raises:
        TrencadisError: The change cannot be applied.
    """
    engine.answer("set_scheduling", {"table": table_of(change, name), "source": name, "may_import": may_import})


def table_of(change: RecordedChange, name: str) -> dict[str, Any]:
    """Return the table of a recorded change. Pure.

    Raises:
        ConfigError: The table cannot be read.
    """
    try:
        return change.table
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ConfigError(f"{name} is damaged: a change of scheduling: {error}.", hint="Copy it again.") from None


def _words(code: ComponentCode | None) -> str:
    if code is None:
        return "not there"
    component, distribution, version, digest = code
    return (
        f"{component} of {f'{distribution} {version}'.strip() or 'no distribution'} (code {digest[:12] or 'unknown'})"
    )


@contextlib.contextmanager
def as_of_a_record() -> Iterator[None]:
    """Turn exceptions of an engine or plugin that was given the content of a record into errors of Trencadís.

    Raises:
        ConfigError: An exception was raised that is no error of Trencadís.
    """
    try:
        yield
    except TrencadisError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the record cannot be replayed: {as_words(error)}.",
            hint="It was changed after it was written, or a plugin has a bug: --traceback shows where.",
        ) from error


@contextlib.contextmanager
def _saying_how_to_trust(name: str) -> Iterator[None]:
    """Add the flag ``--trust`` to the hint of a refused import path."""
    try:
        yield
    except ImportPathRefusedError as error:
        raise ImportPathRefusedError(
            str(error).removesuffix(error.hint).strip(),
            hint=f"If you trust {name} as you trust your own code, add --trust: what it names is imported and run.",
        ) from None


def replayed_engine(
    record: FlightRecord, config: Config, registry: Registry, *, clock: SimulatedClock, executor: ReplayExecutor
) -> Engine:
    """Return an engine of the recorded sizes.

    Args:
        record: Record to replay.
        config: Configuration from :func:`recorded_config`.
        registry: Plugins from :func:`recorded_config`.
        clock: Clock of the engine.
        executor: Executor of the engine.

    Raises:
        TrencadisError: The engine cannot be built.
    """
    num_row_blocks = config.engine.max_num_seqs * -(-record.max_model_len // record.block_size)
    if num_row_blocks > _MAX_ROW_BLOCKS:
        raise ConfigError(
            f"the record says {config.engine.max_num_seqs:,} sequences of up to {record.max_model_len:,} tokens, more than a replay holds."
        )
    if config.engine.max_num_batched_tokens > _MAX_STEP_TOKENS:
        raise ConfigError(
            f"the record says {config.engine.max_num_batched_tokens:,} tokens in a step, more than a replay holds."
        )
    sizes = config.parallel
    num_partitions = sizes.tensor if sizes.attention == "data" else 1
    config = attrs.evolve(
        config,
        model=attrs.evolve(config.model, path="demo", max_model_len=record.max_model_len),
        cache=attrs.evolve(config.cache, num_blocks=record.num_blocks // num_partitions, block_size=record.block_size),
        observer=attrs.evolve(config.observer, names=()),
        engine=attrs.evolve(config.engine, explain_steps=min(config.engine.explain_steps, _MAX_EXPLAINED)),
        flight_recorder=attrs.evolve(config.flight_recorder, num_steps=_FOR_EVER, max_bytes=_FOR_EVER),
    )
    engine = build_engine(config, registry=registry, clock=clock, executor=executor)
    if not isinstance(engine, Engine):
        raise InternalError("an engine that records steps generates")
    return engine


def recorder_of(engine: Engine) -> FlightRecorder:
    """Return the flight recorder of an engine that records its steps."""
    recorder: FlightRecorder = engine.stage("flight_recorder")
    return recorder


def restore(
    engine: Engine, frame: Mapping[str, Any], synthetic: SyntheticRequests, executor: ReplayExecutor, **options: bool
) -> None:
    """Restore the state in which a record begins to an engine and its device.

    Args:
        engine: Engine, just built.
        frame: Key frame of the record.
        synthetic: Requests of the record.
        executor: Executor of the engine.
        options: ``restores_scheduling`` and ``restores_eviction`` of :func:`~trencadis_tools.recorder.key_frame.restore_frame`.
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
            requests[number] = synthetic.request(number)
        return requests[number]

    def pending(plan: Plan) -> PendingStep:
        # A request that has left gets no token, so its number does not matter.
        numbers = tuple(number_of_slot.get(slot, 0) for slot in plan.slots.tolist())
        num_drafts = 0 if plan.drafts is None else plan.drafts.num_drafts
        known = plan.starts + plan.num_scheduled - num_drafts
        return executor.pending(PlannedStep(plan.step, numbers, known, plan.samples.astype(np.int32)), None)

    recorder_of(engine).restore(
        frame, request_of=request_of, tokens_of=synthetic.tokens.__getitem__, pending=pending, **options
    )
