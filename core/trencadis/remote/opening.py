"""What serves clients, with the engine where the configuration places it."""

from __future__ import annotations

from trencadis.config import Config
from trencadis.front import Frontend, open_frontend
from trencadis.registry import Registry

__all__ = ["open_placed_frontend"]


def open_placed_frontend(config: Config, registry: Registry, *, show_progress: bool | None = None) -> Frontend:
    """Load tokenizer and model where ``[engine] placement`` says, and return what serves clients. Takes seconds to minutes.

    Args:
        config: The configuration; ``auto`` is this process.
        registry: The plugins.
        show_progress: Draw bars; None: on a terminal only.

    Raises:
        PluginError: A plugin that was given in code cannot travel to another process.
        TrencadisError: As of :func:`trencadis.front.open_frontend`, wherever it happened.
    """
    if config.engine.placement != "process":
        return open_frontend(config, registry, show_progress=show_progress)
    from trencadis.remote.connect import connect_frontend

    return connect_frontend(config, registry, show_progress=show_progress)
