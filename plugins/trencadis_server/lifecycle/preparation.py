"""The configuration as a server runs it: its engine in a process of its own, and observers whose metrics it can show."""

from __future__ import annotations

from typing import Any

import attrs

from trencadis.api import Config
from trencadis_server.config import server_of

__all__ = ["config_to_serve", "model_names_of"]


def config_to_serve(config: Config, *, placement: str = "process") -> Config:
    """Return the configuration with what the server adds. Pure.

    Args:
        config: As loaded.
        placement: What ``[engine] placement = "auto"`` becomes.
    """
    engine, observer = config.engine, config.observer
    if engine.placement == "auto":
        engine = attrs.evolve(engine, placement=placement)
    added = server_of(config).observer
    if added and added not in observer.names:
        observer = attrs.evolve(observer, names=(*observer.names, added))
    name = model_names_of(config)[0]
    components = {key: _named(options, name) for key, options in observer.components.items()}
    return attrs.evolve(config, engine=engine, observer=attrs.evolve(observer, components=components))


def model_names_of(config: Config) -> tuple[str, ...]:
    """Return the names clients may ask for: ``server.model_name``, split at commas, else ``model.path``. Pure."""
    names = tuple(dict.fromkeys(name for part in server_of(config).model_name.split(",") if (name := part.strip())))
    return names or (config.model.path,)


def _named(options: Any, name: str) -> Any:
    """Return an observer's options with the name of the model, if it asks for one and none is given. Pure."""
    if attrs.has(type(options)) and getattr(options, "model_name", None) == "":
        return attrs.evolve(options, model_name=name)
    return options
