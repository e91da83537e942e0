"""Names for applications that stand on the engine: commands, servers, benchmarks, clusters.

Plugins need the contracts alone (:mod:`trencadis.interfaces`, :mod:`trencadis.records`); programs that generate text need
:class:`trencadis.LLM` or :class:`trencadis.AsyncLLM`. An application that loads a configuration with its plugins, resolves which
component serves each noun, or builds an engine and steps it by itself imports this module, and nothing else of the inside of the
core. Each name is imported on first use, so that ``trencadis --help`` stays light.

    load_with_plugins ▶ ResolvedConfig, Registry ▶ resolve_plan ▶ ResolvedPlan ▶ build_engine ▶ Engine
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trencadis.client.factory import check_model
    from trencadis.client.replicas.connect import make_mover, make_router, make_routing
    from trencadis.client.replicas.mover import LiveRow, Mover
    from trencadis.client.replicas.routing import Routing
    from trencadis.config import Config, ConfigFile, ResolvedConfig, Settings, read_config_file
    from trencadis.config.attribution import reason
    from trencadis.config.check_sources import SourceCheck, check_sources, rules_or_defaults
    from trencadis.config.explain import explain
    from trencadis.config.messages import value_error
    from trencadis.config.schema import BUCKETING_BY_LAYOUT, NounConfig, PluginsConfig
    from trencadis.engine.batching.warmup import completing_buckets
    from trencadis.engine.build import build_engine
    from trencadis.engine.cache.guarded import GuardedEviction
    from trencadis.engine.embedding import EmbeddingEngine
    from trencadis.engine.engine import Engine
    from trencadis.engine.inspect.accounting import EngineTotals
    from trencadis.engine.inspect.snapshot import EngineSnapshot
    from trencadis.engine.layout_support import RANKS, check_layout, unserved_layout
    from trencadis.engine.scheduling.tenants import FailureCosts
    from trencadis.plan_lock import PlanLock, differences, lock_from, lock_of, read_lock
    from trencadis.registry import (
        Choice,
        Provenance,
        RegisteredComponent,
        Registry,
        ResolvedPlan,
        load_with_plugins,
        resolve_plan,
    )
    from trencadis.registry.listing import rows_of
    from trencadis.registry.manager import PluginLoader
    from trencadis.registry.plan import AUTO, NOTHING_CHOSEN
    from trencadis.registry.switching import SchedulingChange, SchedulingInForce, resolve_change
    from trencadis.startup import LEDGER, last_start, start_in_words
    from trencadis.text import (
        Detokenizer,
        Tokenizer,
        chat_template_of,
        check_model_path,
        encode_chat,
        ends_of_turn,
        is_hub_id,
        load_tokenizer,
        render_chat,
        resolve_model_path,
        vocabulary_of,
    )
    from trencadis.thread_watch import ThreadWatch

_HOMES = {
    "AUTO": "registry.plan",
    "BUCKETING_BY_LAYOUT": "config.schema",
    "Choice": "registry",
    "Config": "config",
    "ConfigFile": "config",
    "Detokenizer": "text",
    "EmbeddingEngine": "engine.embedding",
    "Engine": "engine.engine",
    "EngineTotals": "engine.inspect.accounting",
    "EngineSnapshot": "engine.inspect.snapshot",
    "FailureCosts": "engine.scheduling.tenants",
    "GuardedEviction": "engine.cache.guarded",
    "LEDGER": "startup",
    "LiveRow": "client.replicas.mover",
    "Mover": "client.replicas.mover",
    "NOTHING_CHOSEN": "registry.plan",
    "NounConfig": "config.schema",
    "PlanLock": "plan_lock",
    "PluginLoader": "registry.manager",
    "PluginsConfig": "config.schema",
    "Provenance": "registry",
    "RANKS": "engine.layout_support",
    "RegisteredComponent": "registry",
    "Registry": "registry",
    "ResolvedConfig": "config",
    "ResolvedPlan": "registry",
    "Routing": "client.replicas.routing",
    "SchedulingChange": "registry.switching",
    "SchedulingInForce": "registry.switching",
    "Settings": "config",
    "SourceCheck": "config.check_sources",
    "ThreadWatch": "thread_watch",
    "last_start": "startup",
    "start_in_words": "startup",
    "Tokenizer": "text",
    "build_engine": "engine.build",
    "chat_template_of": "text",
    "check_layout": "engine.layout_support",
    "check_model": "client.factory",
    "check_model_path": "text",
    "check_sources": "config.check_sources",
    "completing_buckets": "engine.batching.warmup",
    "differences": "plan_lock",
    "encode_chat": "text",
    "is_hub_id": "text",
    "ends_of_turn": "text",
    "explain": "config.explain",
    "load_tokenizer": "text",
    "load_with_plugins": "registry",
    "lock_from": "plan_lock",
    "lock_of": "plan_lock",
    "make_mover": "client.replicas.connect",
    "make_router": "client.replicas.connect",
    "make_routing": "client.replicas.connect",
    "read_config_file": "config",
    "read_lock": "plan_lock",
    "reason": "config.attribution",
    "render_chat": "text",
    "resolve_change": "registry.switching",
    "resolve_model_path": "text",
    "resolve_plan": "registry",
    "rows_of": "registry.listing",
    "rules_or_defaults": "config.check_sources",
    "unserved_layout": "engine.layout_support",
    "value_error": "config.messages",
    "vocabulary_of": "text",
}

__all__ = [
    "AUTO",
    "BUCKETING_BY_LAYOUT",
    "NOTHING_CHOSEN",
    "Choice",
    "Config",
    "ConfigFile",
    "Detokenizer",
    "EmbeddingEngine",
    "Engine",
    "EngineSnapshot",
    "EngineTotals",
    "FailureCosts",
    "GuardedEviction",
    "LEDGER",
    "LiveRow",
    "Mover",
    "NounConfig",
    "PlanLock",
    "PluginLoader",
    "PluginsConfig",
    "Provenance",
    "RANKS",
    "RegisteredComponent",
    "Registry",
    "ResolvedConfig",
    "ResolvedPlan",
    "Routing",
    "SchedulingChange",
    "SchedulingInForce",
    "Settings",
    "SourceCheck",
    "ThreadWatch",
    "Tokenizer",
    "build_engine",
    "chat_template_of",
    "check_layout",
    "check_model",
    "check_model_path",
    "check_sources",
    "completing_buckets",
    "differences",
    "encode_chat",
    "ends_of_turn",
    "explain",
    "is_hub_id",
    "load_tokenizer",
    "load_with_plugins",
    "last_start",
    "lock_from",
    "lock_of",
    "make_mover",
    "make_router",
    "make_routing",
    "read_config_file",
    "read_lock",
    "reason",
    "render_chat",
    "resolve_change",
    "resolve_model_path",
    "resolve_plan",
    "rows_of",
    "rules_or_defaults",
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
