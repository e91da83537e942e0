"""Factory: configuration and plugins from arguments, and a frontend with the engine where the configuration places it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from trencadis.activity import ACTIVITY
from trencadis.client.engine_client import LocalEngineClient
from trencadis.client.engine_thread import EngineThread
from trencadis.client.frontend import Frontend
from trencadis.client.runner import Runner
from trencadis.config import Config
from trencadis.config.messages import spot
from trencadis.config.schema import FOR_REPLICAS
from trencadis.console import Advance, track
from trencadis.errors import ConfigValueError
from trencadis.log import loading_level
from trencadis.registry import Registry, load_with_plugins
from trencadis.registry.startup import find_placement
from trencadis.startup import LEDGER, rare_collections
from trencadis.text import check_model_path, load_configured_tokenizer
from trencadis.text.tokenizer import NO_TOKENIZER

__all__ = [
    "check_model",
    "configure",
    "loading",
    "open_frontend",
    "open_local_frontend",
    "open_runner",
]


def configure(
    model: str | Mapping[str, Any] | None, *, config_file: str | Path | None, tables: Mapping[str, Any]
) -> tuple[Config, Registry]:
    """Resolve the configuration and load the plugins for the arguments of ``LLM`` and ``AsyncLLM``.

    Args:
        model: ``model.path``, or the whole table ``[model]``; None leaves it to the file, the environment or the default.
        config_file: A TOML file, or None.
        tables: Tables of the configuration, such as ``{"engine": {"max_num_seqs": 8}}``; win over all other sources.

    Raises:
        ConfigError: A table, key or value that cannot be, with a suggestion.
        PluginError: A plugin cannot be used.
    """
    overrides = dict(tables)
    if model is not None:
        overrides["model"] = model if isinstance(model, Mapping) else {"path": str(model)}
    file = None if config_file is None else Path(config_file)
    resolved, registry = load_with_plugins(file=file, overrides=overrides)
    return resolved.config, registry


def check_model(config: Config, sources: Mapping[str, str], *, asks_hub: bool = True) -> None:
    """Refuse a model or tokenizer that is nowhere, before anything is loaded.

    Args:
        config: Table ``model`` is read.
        sources: Who set each value, by dotted path.
        asks_hub: See :func:`trencadis.text.check_model_path`.

    Raises:
        ModelLoadError: With the path and who set it.
    """
    model = config.model
    for key, path in (("path", model.path), ("tokenizer", model.tokenizer)):
        if path and not (key == "tokenizer" and path == NO_TOKENIZER):
            where = spot(f"model.{key}", path, sources.get(f"model.{key}", ""))
            check_model_path(path, where=where, revision=model.revision, asks_hub=asks_hub)


@contextlib.contextmanager
def loading(config: Config, part: Callable[[], str], *, show: bool | None) -> Iterator[Advance]:
    """Show the progress of loading during a ``with`` block; meanwhile the log has the level that is meant for it.

    Args:
        config: The engines' configuration.
        part: Returns the part of loading that runs now.
        show: Draw a line; None: on a terminal only.

    Yields:
        A function that takes how many buckets are done by now.
    """
    with loading_level(), track(f"Loading {config.model.path}", unit="buckets", show=show, part=part) as advance:
        yield advance


def open_local_frontend(config: Config, registry: Registry, *, show_progress: bool | None = None) -> Frontend:
    """Load tokenizer and model in this process, warm up, and return the frontend. Takes seconds to minutes.

    Args:
        config: The configuration.
        registry: The plugins.
        show_progress: Draw bars; None: on a terminal only.

    Raises:
        TrencadisError: Anything :func:`trencadis.engine.build.build_engine` and
            :func:`trencadis.text.load_tokenizer` raise.
    """
    from trencadis.engine.build import build_engine

    with rare_collections(), loading(config, lambda: ACTIVITY.read().part, show=show_progress) as advance:
        ACTIVITY.begin_part("tokenizer")
        LEDGER.begin("tokenizer")
        # The tokenizer first: it is cheap, and a wrong path is known before any weights are read.
        tokenizer = load_configured_tokenizer(config)
        LEDGER.note_cache(found=tokenizer.is_remembered)
        engine = build_engine(config, registry=registry, progress=advance)
        return Frontend(LocalEngineClient(engine), tokenizer)


def open_frontend(config: Config, registry: Registry, *, show_progress: bool | None = None) -> Frontend:
    """Load tokenizer and model where ``[engine] placement`` says, and return the frontend. Takes seconds to minutes.

    Args:
        config: The configuration; ``auto`` is this process, unless ``parallel.data`` is above 1.
        registry: The plugins.
        show_progress: Draw bars; None: on a terminal only.

    Raises:
        PluginError: A plugin that was given in code cannot travel to another process.
        TrencadisError: See :func:`trencadis.client.open_local_frontend`, wherever it happened.
    """
    check_model(config, registry.sources)
    placement = _elsewhere(config, registry)
    if placement is None:
        return open_local_frontend(config, registry, show_progress=show_progress)
    frontend: Frontend = placement.open_frontend(config, registry, show_progress=show_progress)
    return frontend


def open_runner(config: Config, registry: Registry) -> Runner:
    """Load as :func:`open_frontend` does, and return what serves coroutines.

    Raises:
        TrencadisError: See :func:`open_frontend`.
    """
    check_model(config, registry.sources)
    placement = _elsewhere(config, registry)
    if placement is None:
        return EngineThread(lambda: open_local_frontend(config, registry))
    runner: Runner = placement.open_runner(config, registry)
    return runner


def _elsewhere(config: Config, registry: Registry) -> ModuleType | None:
    """Return the module of the placement; None: the engine runs in this process.

    Raises:
        ConfigValueError: Several engines were asked for in this process.
    """
    name, num_replicas = config.engine.placement, config.parallel.data
    if num_replicas > 1 and name == "thread":
        where = spot("engine.placement", name, registry.sources.get("engine.placement", ""))
        raise ConfigValueError(
            f"{where}: parallel.data = {num_replicas} engines need a process each.",
            hint='Set engine.placement to "auto", or parallel.data to 1.',
        )
    if num_replicas > 1 and name == "auto":
        name = FOR_REPLICAS
    placement = find_placement(registry, name)
    return None if placement is None else placement.load()
