"""Starts a worker process and returns the frontend that uses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trencadis.api import LEDGER, Config, Registry, dump_config, load_configured_tokenizer
from trencadis.client.factory import loading
from trencadis.client.frontend import Frontend
from trencadis.clock import SystemClock
from trencadis.console import on_terminal
from trencadis.errors import PluginError
from trencadis.log import log_levels
from trencadis.startup import end_start, rare_collections
from trencadis_remote.process.client import RemoteEngineClient
from trencadis_remote.process.messages import FailedMessage, ReadyMessage
from trencadis_remote.process.process import EngineProcess
from trencadis_remote.process.transport import Transport

__all__ = ["connect_frontend", "end_start_with", "open_transport", "wait_until_ready"]

_PROGRESS_S = 0.2
"""Seconds between reads of the worker's progress while it loads."""


def connect_frontend(
    config: Config, registry: Registry, *, show_progress: bool | None = None, never_waits: bool = False
) -> Frontend:
    """Start the worker process, load the tokenizer meanwhile, and return the frontend.

    Args:
        config: The configuration; the process finds the same plugins and loads it again.
        registry: The plugins.
        show_progress: Draw a bar; None: on a terminal only.
        never_waits: Requests wait in memory while the socket is full; else their sender waits.

    Raises:
        PluginError: A plugin that was given in code cannot travel to another process.
        TrencadisError: The error of the worker process.
        EngineEndedError: The process died before it was ready.
    """
    transport = open_transport(config, registry, never_waits=never_waits)
    try:
        with loading(config, lambda: transport.part or "starting", show=show_progress) as advance:
            with rare_collections():
                tokenizer = load_configured_tokenizer(config)  # while the child imports and loads
            shows = on_terminal() if show_progress is None else show_progress  # else the child's log says it
            ready = wait_until_ready(transport, (lambda: advance(*transport.progress)) if shows else None)
            end_start_with(config, [ready])
            return Frontend(RemoteEngineClient(transport, ready), tokenizer)
    except BaseException:
        transport.failure = transport.failure or "the engine was not ready."
        transport.close()
        raise


def end_start_with(config: Config, ready: Sequence[ReadyMessage]) -> None:
    """End the ledger of this process, with that of the engine that took longest.

    Args:
        config: Configuration of the engines.
        ready: First message of each engine.
    """
    LEDGER.include(max((one.start for one in ready), key=lambda start: sum(entry.seconds for entry in start)))
    end_start(config.model.path)


def open_transport(
    config: Config, registry: Registry, *, never_waits: bool = False, sends_load: bool = False
) -> Transport:
    """Start a worker process and return the connection to it; it is not ready yet.

    Args:
        config: The configuration.
        registry: The plugins.
        never_waits: See :func:`connect_frontend`.
        sends_load: See :class:`EngineProcess`.

    Raises:
        PluginError: See :func:`connect_frontend`.
    """
    _check_plugins(registry)
    LEDGER.begin("engine process")
    process = EngineProcess(
        tables=_tables(config, registry),
        sources=dict(registry.sources),
        log_levels=log_levels(),
        watchdog_s=config.engine.watchdog_s,
        sends_load=sends_load,
        never_waits=never_waits,
    )
    return Transport(process.channel, process, clock=SystemClock())


def _tables(config: Config, registry: Registry) -> dict[str, Any]:
    """Return the configuration without tables of plugins' nouns that choose the default: their names would ask for plugins on demand."""
    idle = {name: {"name": noun.default} for name, noun in registry.nouns.items() if name in config.tables}
    return {name: table for name, table in dump_config(config).items() if table != idle.get(name)}


def _check_plugins(registry: Registry) -> None:
    given = list(map(str, registry.given_in_code))
    if given:
        raise PluginError(
            f"[engine] placement = process: {'; '.join(given)} cannot travel to another process.",
            hint='Install it with an entry point, name its component by import path, or set placement = "thread".',
        )


def wait_until_ready(transport: Transport, look: Callable[[], None] | None) -> ReadyMessage:
    """Return the first message of a worker.

    Args:
        transport: To it.
        look: Called several times a second meanwhile; it may raise to give up.

    Raises:
        TrencadisError: The error of the worker process.
        EngineEndedError: The process died before it was ready.
    """
    while True:
        messages = transport.wait(_PROGRESS_S if look is not None else None)
        if look is not None:
            look()
        for message in messages:
            match message:
                case ReadyMessage():
                    return message
                case FailedMessage(error=error):
                    raise error
