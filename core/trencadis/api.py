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
    from trencadis.activity import ACTIVITY, ActivityReading, ActivityView, EnginePhase
    from trencadis.client.client_request import ClientRequest
    from trencadis.client.dispatcher import (
        Abort,
        Command,
        ControlRequest,
        Embed,
        MetricsRequest,
        RequestDispatcher,
        Submission,
        engine_ended,
    )
    from trencadis.client.engine_client import NO_OUTPUTS, EngineClient, StepOutputs, step_outputs
    from trencadis.client.factory import check_model, loading
    from trencadis.client.frontend import Frontend
    from trencadis.client.output_stream import OutputStream, running_loop
    from trencadis.client.runner import Runner
    from trencadis.config import Config, ConfigFile, ResolvedConfig, Settings
    from trencadis.config.attribution import reason
    from trencadis.config.dump import dump_config, dump_options
    from trencadis.config.explain import explain
    from trencadis.config.load import load_config, rules_or_defaults
    from trencadis.config.messages import origin, show, value_error
    from trencadis.config.schema import BUCKETING_BY_LAYOUT, NounConfig, PluginsConfig, RouterConfig
    from trencadis.config.settings import ENVIRONMENT_PREFIX
    from trencadis.console import on_terminal, track
    from trencadis.engine.batching.warmup import completing_buckets
    from trencadis.engine.build import build_engine
    from trencadis.engine.cache.guarded import GuardedEviction
    from trencadis.engine.cache.hashing import BlockHasher
    from trencadis.engine.engine import Engine
    from trencadis.engine.guard import Guarded
    from trencadis.engine.request_check import check_request
    from trencadis.engine.stage import AnyEngine
    from trencadis.failure_costs import FailureCosts
    from trencadis.log import configure_logging, loading_level, log_levels
    from trencadis.records import EngineTotals
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
    from trencadis.startup import (
        LEDGER,
        LedgerEntry,
        claim_process,
        end_start,
        last_start,
        rare_collections,
        start_in_words,
    )
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
    "ACTIVITY": "activity",
    "AUTO": "registry.plan",
    "BUCKETING_BY_LAYOUT": "config.schema",
    "ENVIRONMENT_PREFIX": "config.settings",
    "LEDGER": "startup",
    "NOTHING_CHOSEN": "registry.plan",
    "NO_OUTPUTS": "client.engine_client",
    "RANKS": "registry.layout_support",
    "Abort": "client.dispatcher",
    "ActivityReading": "activity",
    "ActivityView": "activity",
    "AnyEngine": "engine.stage",
    "BlockHasher": "engine.cache.hashing",
    "Builder": "registry.building",
    "Choice": "registry",
    "ClientRequest": "client.client_request",
    "Command": "client.dispatcher",
    "Config": "config",
    "ConfigFile": "config",
    "ControlRequest": "client.dispatcher",
    "Detokenizer": "text",
    "Embed": "client.dispatcher",
    "Engine": "engine.engine",
    "EngineClient": "client.engine_client",
    "EnginePhase": "activity",
    "EngineTotals": "records",
    "FailureCosts": "failure_costs",
    "Frontend": "client.frontend",
    "Guarded": "engine.guard",
    "GuardedEviction": "engine.cache.guarded",
    "LedgerEntry": "startup",
    "Meters": "registry.building",
    "MetricsRequest": "client.dispatcher",
    "NounConfig": "config.schema",
    "OutputStream": "client.output_stream",
    "PluginLoader": "registry.manager",
    "PluginsConfig": "config.schema",
    "Provenance": "registry",
    "RegisteredComponent": "registry",
    "Registry": "registry",
    "RequestDispatcher": "client.dispatcher",
    "ResolvedConfig": "config",
    "ResolvedPlan": "registry",
    "RouterConfig": "config.schema",
    "Runner": "client.runner",
    "SchedulingChange": "switching",
    "SchedulingInForce": "switching",
    "Settings": "config",
    "StepOutputs": "client.engine_client",
    "Submission": "client.dispatcher",
    "ThreadWatch": "thread_watch",
    "Tokenizer": "text",
    "build_engine": "engine.build",
    "chat_template_of": "text",
    "check_layout": "registry.layout_support",
    "check_model": "client.factory",
    "check_model_path": "text",
    "check_request": "engine.request_check",
    "claim_process": "startup",
    "completing_buckets": "engine.batching.warmup",
    "configure_logging": "log",
    "dump_config": "config.dump",
    "dump_options": "config.dump",
    "encode_chat": "text",
    "end_start": "startup",
    "ends_of_turn": "text",
    "engine_ended": "client.dispatcher",
    "explain": "config.explain",
    "is_hub_id": "text",
    "last_start": "startup",
    "load_config": "config.load",
    "load_configured_tokenizer": "text",
    "load_tokenizer": "text",
    "load_with_plugins": "registry",
    "loading": "client.factory",
    "loading_level": "log",
    "log_levels": "log",
    "on_terminal": "console",
    "origin": "config.messages",
    "rare_collections": "startup",
    "read_prefixes": "text",
    "reason": "config.attribution",
    "render_chat": "text",
    "resolve_change": "switching",
    "resolve_model_path": "text",
    "resolve_plan": "registry",
    "rows_of": "registry.listing",
    "rules_or_defaults": "config.load",
    "running_loop": "client.output_stream",
    "show": "config.messages",
    "start_in_words": "startup",
    "step_outputs": "client.engine_client",
    "track": "console",
    "unserved_layout": "registry.layout_support",
    "value_error": "config.messages",
    "vocabulary_of": "text",
}

__all__ = [
    "ACTIVITY",
    "AUTO",
    "BUCKETING_BY_LAYOUT",
    "ENVIRONMENT_PREFIX",
    "LEDGER",
    "NOTHING_CHOSEN",
    "NO_OUTPUTS",
    "RANKS",
    "Abort",
    "ActivityReading",
    "ActivityView",
    "AnyEngine",
    "BlockHasher",
    "Builder",
    "Choice",
    "ClientRequest",
    "Command",
    "Config",
    "ConfigFile",
    "ControlRequest",
    "Detokenizer",
    "Embed",
    "Engine",
    "EngineClient",
    "EnginePhase",
    "EngineTotals",
    "FailureCosts",
    "Frontend",
    "Guarded",
    "GuardedEviction",
    "LedgerEntry",
    "Meters",
    "MetricsRequest",
    "NounConfig",
    "OutputStream",
    "PluginLoader",
    "PluginsConfig",
    "Provenance",
    "RegisteredComponent",
    "Registry",
    "RequestDispatcher",
    "ResolvedConfig",
    "ResolvedPlan",
    "RouterConfig",
    "Runner",
    "SchedulingChange",
    "SchedulingInForce",
    "Settings",
    "StepOutputs",
    "Submission",
    "ThreadWatch",
    "Tokenizer",
    "build_engine",
    "chat_template_of",
    "check_layout",
    "check_model",
    "check_model_path",
    "check_request",
    "claim_process",
    "completing_buckets",
    "configure_logging",
    "dump_config",
    "dump_options",
    "encode_chat",
    "end_start",
    "ends_of_turn",
    "engine_ended",
    "explain",
    "is_hub_id",
    "last_start",
    "load_config",
    "load_configured_tokenizer",
    "load_tokenizer",
    "load_with_plugins",
    "loading",
    "loading_level",
    "log_levels",
    "on_terminal",
    "origin",
    "rare_collections",
    "read_prefixes",
    "reason",
    "render_chat",
    "resolve_change",
    "resolve_model_path",
    "resolve_plan",
    "rows_of",
    "rules_or_defaults",
    "running_loop",
    "show",
    "start_in_words",
    "step_outputs",
    "track",
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
