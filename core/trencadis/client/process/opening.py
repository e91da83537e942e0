"""What serves clients, with the engine where the configuration places it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trencadis.client import Frontend, open_frontend
from trencadis.client.engine_thread import EngineThread
from trencadis.config import Config
from trencadis.registry import Registry

if TYPE_CHECKING:
    from trencadis.client.process.engine_loop import EngineLoop

__all__ = ["open_placed_frontend", "open_runner"]


def open_placed_frontend(config: Config, registry: Registry, *, show_progress: bool | None = None) -> Frontend:
    """Load tokenizer and model where ``[engine] placement`` says, and return what serves clients. Takes seconds to minutes.

    Args:
        config: The configuration; ``auto`` is this process.
        registry: The plugins.
        show_progress: Draw bars; None: on a terminal only.

    Raises:
        PluginError: A plugin that was given in code cannot travel to another process.
        TrencadisError: As of :func:`trencadis.client.open_frontend`, wherever it happened.
    """
    if config.engine.placement != "process":
        return open_frontend(config, registry, show_progress=show_progress)
    from trencadis.client.process.connect import connect_frontend

    return connect_frontend(config, registry, show_progress=show_progress)


def open_runner(config: Config, registry: Registry) -> EngineThread | EngineLoop:
    """Load as :func:`open_placed_frontend` does, and return what serves coroutines: a thread, or the loop that they run on.

    Raises:
        TrencadisError: As of :func:`open_placed_frontend`.
    """
    if config.engine.placement != "process":
        return EngineThread(lambda: open_frontend(config, registry))
    from trencadis.client.process.connect import connect_frontend
    from trencadis.client.process.engine_loop import EngineLoop

    return EngineLoop(connect_frontend(config, registry, never_waits=True))
