"""The placement ``process``: one engine in a process of its own, or several."""

from __future__ import annotations

from trencadis.api import Config, Registry
from trencadis.client.frontend import Frontend
from trencadis.client.runner import Runner
from trencadis_remote.process.engine_loop import EngineLoop

__all__ = ["open_frontend", "open_runner"]


def open_frontend(
    config: Config, registry: Registry, *, show_progress: bool | None = None, never_waits: bool = False
) -> Frontend:
    """Start the processes and return the frontend when all engines are ready. Takes seconds to minutes.

    Args:
        config: ``parallel.data`` is the number of engines.
        registry: The plugins.
        show_progress: Draw a bar; None: on a terminal only.
        never_waits: Requests wait in memory while a socket is full; else their sender waits.

    Raises:
        PluginError: A plugin that was given in code cannot travel to another process.
        TrencadisError: The error of an engine's process.
        EngineEndedError: A process died before its engine was ready.
    """
    if config.parallel.data > 1:
        from trencadis_remote.replicas.connect import connect_replicas

        return connect_replicas(config, registry, show_progress=show_progress, never_waits=never_waits)
    from trencadis_remote.process.connect import connect_frontend

    return connect_frontend(config, registry, show_progress=show_progress, never_waits=never_waits)


def open_runner(config: Config, registry: Registry) -> Runner:
    """Load as :func:`open_frontend` does, and return the engine loop.

    Raises:
        TrencadisError: See :func:`open_frontend`.
    """
    return EngineLoop(open_frontend(config, registry, never_waits=True))
