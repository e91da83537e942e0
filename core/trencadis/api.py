"""Names for applications that stand on the engine: commands, servers, benchmarks, clusters.

Plugins need the contracts alone (:mod:`trencadis.interfaces`, :mod:`trencadis.records`); programs that generate text need
:class:`trencadis.LLM` or :class:`trencadis.AsyncLLM`. An application that loads a configuration with its plugins, resolves which
component serves each noun, or builds an engine and steps it by itself imports this module; what runs engines elsewhere imports the
inside of the client, too, and nothing else of the inside of the core is open (see the import contracts). Each name is imported on
first use, so that ``trencadis --help`` stays light.

    load_with_plugins ▶ ResolvedConfig, Registry ▶ resolve_plan ▶ ResolvedPlan ▶ build_engine ▶ Engine
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trencadis.client.factory import check_model
    from trencadis.config import Config, ConfigFile, ResolvedConfig, Settings
    from trencadis.config.attribution import reason
    from trencadis.config.dump import dump_config, dump_options
    from trencadis.config.explain import explain
    from trencadis.config.load import load_config, rules_or_defaults
    from trencadis.config.messages import origin, show, value_error
    from trencadis.config.schema import BUCKETING_BY_LAYOUT, NounConfig, PluginsConfig, RouterConfig
    from trencadis.config.settings import ENVIRONMENT_PREFIX
    from trencadis.engine.batching.warmup import wanted_covering_buckets
    from trencadis.engine.build import build_engine
    from trencadis.engine.cache.guarded import GuardedEviction
    from trencadis.engine.cache.hashing import BlockHasher
    from trencadis.engine.engine import Engine
    from trencadis.engine.request_check import check_request
    from trencadis.engine.stage import AnyEngine
    from trencadis.registry import (
        Choice,
        Provenance,
        RegisteredComponent,
        Registry,
        ResolvedPlan,
        load_with_plugins,
        resolve_plan,
    )
    from trencadis.registry.building import Builder, Meters
    from trencadis.registry.layout_support import RANKS, check_layout, unserved_layout
    from trencadis.registry.listing import rows_of
    from trencadis.registry.manager import PluginLoader
    from trencadis.registry.plan import AUTO, NOTHING_CHOSEN
    from trencadis.startup import LEDGER, last_start, start_in_words
    from trencadis.switching import SchedulingChange, SchedulingInForce, resolve_change
    from trencadis.text import (
        Detokenizer,
        Tokenizer,
        chat_template_of,
        check_model_path,
        encode_chat,
        ends_of_turn,
        is_hub_id,
        load_configured_tokenizer,
        load_tokenizer,
        read_prefixes,
        render_chat,
        resolve_model_path,
        vocabulary_of,
    )
    from trencadis.thread_watch import ThreadWatch

_HOMES = {
    "AUTO": "registry.plan",
    "BUCKETING_BY_LAYOUT": "config.schema",
    "ENVIRONMENT_PREFIX": "config.settings",
    "LEDGER": "startup",
    "NOTHING_CHOSEN": "registry.plan",
    "RANKS": "registry.layout_support",
    "AnyEngine": "engine.stage",
    "BlockHasher": "engine.cache.hashing",
    "Builder": "registry.building",
    "Choice": "registry",
    "Config": "config",
    "ConfigFile": "config",
    "Detokenizer": "text",
    "Engine": "engine.engine",
    "GuardedEviction": "engine.cache.guarded",
    "Meters": "registry.building",
    "NounConfig": "config.schema",
    "PluginLoader": "registry.manager",
    "PluginsConfig": "config.schema",
    "Provenance": "registry",
    "RegisteredComponent": "registry",
    "Registry": "registry",
    "ResolvedConfig": "config",
    "ResolvedPlan": "registry",
    "RouterConfig": "config.schema",
    "SchedulingChange": "switching",
    "SchedulingInForce": "switching",
    "Settings": "config",
    "ThreadWatch": "thread_watch",
    "Tokenizer": "text",
    "build_engine": "engine.build",
    "chat_template_of": "text",
    "check_layout": "registry.layout_support",
    "check_model": "client.factory",
    "check_model_path": "text",
    "check_request": "engine.request_check",
    "wanted_covering_buckets": "engine.batching.warmup",
    "dump_config": "config.dump",
    "dump_options": "config.dump",
    "encode_chat": "text",
    "ends_of_turn": "text",
    "explain": "config.explain",
    "is_hub_id": "text",
    "last_start": "startup",
    "load_config": "config.load",
    "load_configured_tokenizer": "text",
    "load_tokenizer": "text",
    "load_with_plugins": "registry",
    "origin": "config.messages",
    "read_prefixes": "text",
    "reason": "config.attribution",
    "render_chat": "text",
    "resolve_change": "switching",
    "resolve_model_path": "text",
    "resolve_plan": "registry",
    "rows_of": "registry.listing",
    "rules_or_defaults": "config.load",
    "show": "config.messages",
    "start_in_words": "startup",
    "unserved_layout": "registry.layout_support",
    "value_error": "config.messages",
    "vocabulary_of": "text",
}

__all__ = [
    "AUTO",
    "BUCKETING_BY_LAYOUT",
    "ENVIRONMENT_PREFIX",
    "LEDGER",
    "NOTHING_CHOSEN",
    "RANKS",
    "AnyEngine",
    "BlockHasher",
    "Builder",
    "Choice",
    "Config",
    "ConfigFile",
    "Detokenizer",
    "Engine",
    "GuardedEviction",
    "Meters",
    "NounConfig",
    "PluginLoader",
    "PluginsConfig",
    "Provenance",
    "RegisteredComponent",
    "Registry",
    "ResolvedConfig",
    "ResolvedPlan",
    "RouterConfig",
    "SchedulingChange",
    "SchedulingInForce",
    "Settings",
    "ThreadWatch",
    "Tokenizer",
    "build_engine",
    "chat_template_of",
    "check_layout",
    "check_model",
    "check_model_path",
    "check_request",
    "wanted_covering_buckets",
    "dump_config",
    "dump_options",
    "encode_chat",
    "ends_of_turn",
    "explain",
    "is_hub_id",
    "last_start",
    "load_config",
    "load_configured_tokenizer",
    "load_tokenizer",
    "load_with_plugins",
    "origin",
    "read_prefixes",
    "reason",
    "render_chat",
    "resolve_change",
    "resolve_model_path",
    "resolve_plan",
    "rows_of",
    "rules_or_defaults",
    "show",
    "start_in_words",
    "unserved_layout",
    "value_error",
    "vocabulary_of",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"trencadis.{home}"), name)
    globals()[name] = value
    return value
