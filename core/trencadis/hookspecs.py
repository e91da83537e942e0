"""Every hook of Trencadís, in one file.

Three kinds, three name shapes, nothing else. *Register* hooks (plural nouns) yield components, nouns, commands,
configuration tables or health checks. *Life cycle* hooks return
nothing. *Decide* hooks return the first answer that is not None. pluggy runs at start-up and shut-down only: a step calls
plain methods of the objects that the components' factories made.

A plugin is a module or package named by an entry point of the group ``trencadis``::

    # pyproject.toml
    [project.entry-points.trencadis]
    fibonacci = "my_package"

One with the extra ``on_demand``, ``"my_package [on_demand]"``, is imported by ``generate``, ``run``, ``chat``, ``serve`` and ``LLM`` only if the
entry point's name stands anywhere in flags, variables, the file or the arguments, as key, value or part of either, or if a key or component is
asked for that is not known without it; all else imports every plugin. Further extras that end in an underscore, ``"my_package [on_demand, OTHER_]"``,
are beginnings of environment variables that ask for it too. It is for plugins whose hooks have nothing to do otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pluggy

from trencadis.interfaces.command import Command
from trencadis.interfaces.component import Component
from trencadis.interfaces.config_table import ConfigTable
from trencadis.interfaces.health_check import HealthCheck
from trencadis.interfaces.noun import Noun
from trencadis.interfaces.placement import Placement
from trencadis.interfaces.stage_definition import StageDefinition

if TYPE_CHECKING:
    from pathlib import Path

    from trencadis.records import ModelFacts

__all__ = ["NOUNS", "PROCESSOR_GROUP", "PROJECT_NAME", "hookimpl", "hookspec"]

PROJECT_NAME = "trencadis"

PROCESSOR_GROUP = f"{PROJECT_NAME}.logits_processors"
"""Entry points of this group name classes of logits processors, or functions that return one, for samplers with a chain of them."""

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)

NOUNS: Mapping[str, str] = {
    "bucketing": "trencadis_bucketings",
    "scheduling": "trencadis_scheduling_policies",
    "eviction": "trencadis_eviction_policies",
    "sampling": "trencadis_samplers",
    "speculation": "trencadis_speculators",
    "draft_length": "trencadis_draft_lengths",
    "acceptance": "trencadis_acceptance_rules",
    "kv_connector": "trencadis_kv_connectors",
    "router": "trencadis_routers",
    "backend": "trencadis_backends",
    "executor": "trencadis_executors",
    "observer": "trencadis_observers",
}
"""Each noun of the core and its register hook; plugins add nouns by ``trencadis_nouns``."""


# ---------------------------------------------------------------------------------------------------- register


@hookspec
def trencadis_bucketings() -> Iterable[Component]:
    """Yield bucketing strategies: which static shapes exist, and which one a pass uses.

    *Called:* once, when the registry is built. *Factory returns:* a ``BucketingStrategy``. *Since:* 0.1.

    Example::

        @hookimpl
        def trencadis_bucketings():
            def make(config, context):
                from my_package.fibonacci import Fibonacci

                return Fibonacci(context.limits)

            yield Component(name="fibonacci", factory=make, summary="Sizes that grow like rabbits.", interface_version=1)
    """


@hookspec
def trencadis_scheduling_policies() -> Iterable[Component]:
    """Yield scheduling policies: admission, order, budgets, chunk size, victim.

    *Called:* once, when the registry is built. *Factory returns:* a ``SchedulingPolicy``. *Since:* 0.1.
    """


@hookspec
def trencadis_eviction_policies() -> Iterable[Component]:
    """Yield eviction policies: which unreferenced cached blocks go first.

    *Called:* once, when the registry is built. *Factory returns:* an ``EvictionPolicy``. *Since:* 0.1.
    """


@hookspec
def trencadis_samplers() -> Iterable[Component]:
    """Yield samplers: logits to tokens.

    *Called:* once, when the registry is built. *Factory returns:* a ``Sampler``; called once per rank, in the rank's own
    process. *Since:* 0.1.
    """


@hookspec
def trencadis_speculators() -> Iterable[Component]:
    """Yield speculators: who drafts tokens for the model to verify.

    *Called:* once, when the registry is built. *Factory returns:* a ``Speculator``. *Since:* 0.1.
    """


@hookspec
def trencadis_draft_lengths() -> Iterable[Component]:
    """Yield draft lengths: how many tokens are worth drafting.

    *Called:* once, when the registry is built. *Factory returns:* a ``DraftLength``. *Since:* 0.1.
    """


@hookspec
def trencadis_acceptance_rules() -> Iterable[Component]:
    """Yield acceptance rules: which drafts stand, and what follows them.

    *Called:* once, when the registry is built. *Factory returns:* an ``AcceptanceRule``. *Since:* 0.1.
    """


@hookspec
def trencadis_kv_connectors() -> Iterable[Component]:
    """Yield KV connectors: KV blocks in and out of this engine.

    *Called:* once, when the registry is built. *Factory returns:* a ``ConnectorPair``. *Since:* 0.1.
    """


@hookspec
def trencadis_routers() -> Iterable[Component]:
    """Yield routers: which replica takes a request.

    *Called:* once, when the registry is built. *Factory returns:* a ``Router``; called in the process of the clients, with
    ``parallel.data`` above 1. *Since:* 0.1.
    """


@hookspec
def trencadis_backends() -> Iterable[Component]:
    """Yield backends: who runs batches on a device.

    *Called:* once, when the registry is built. *Factory returns:* a ``Backend``; called once per rank, in the rank's own
    process. *Since:* 0.1.
    """


@hookspec
def trencadis_executors() -> Iterable[Component]:
    """Yield executors: one process or many.

    *Called:* once, when the registry is built. *Factory returns:* an ``Executor``. *Since:* 0.1.
    """


@hookspec
def trencadis_observers() -> Iterable[Component]:
    """Yield observers: who sees steps and requests.

    *Called:* once, when the registry is built. *Factory returns:* an ``Observer``. *Since:* 0.1.
    """


@hookspec
def trencadis_nouns() -> Iterable[Noun]:
    """Yield nouns: kinds of components that other plugins may offer, with a table and a hook of their own.

    *Called:* once, when the registry is built, before components are collected; the plugin cannot be there on demand. *Since:* 0.1.

    Example::

        @hookimpl
        def trencadis_nouns():
            from my_package.interfaces.tracer import Tracer
            from trencadis.interfaces import Noun

            yield Noun(name="tracer", hook="trencadis_tracers", contract=Tracer, default="none")
    """


@hookspec
def trencadis_stages() -> Iterable[StageDefinition]:
    """Yield stages: what an engine does beside planning, running and committing steps, at moments of a step.

    *Called:* once, when the registry is built. *Since:* 0.1.

    Example::

        @hookimpl
        def trencadis_stages():
            def make(makings):
                from my_package.token_cap import TokenCap

                return TokenCap(makings.config)

            yield StageDefinition(name="token_cap", make=make, summary="Caps the cached tokens of each tenant.")
    """


@hookspec
def trencadis_commands() -> Iterable[Command]:
    """Yield commands of ``trencadis``.

    *Called:* by ``trencadis --help``, and when the command line names a command that the core does not have. *Since:* 0.1.

    Example::

        @hookimpl
        def trencadis_commands():
            yield Command(
                name="replay",
                summary="Send a recorded trace to a server.",
                load=lambda: importlib.import_module("my_package.replay"),
            )
    """


@hookspec
def trencadis_tables() -> Iterable[ConfigTable]:
    """Yield tables of the configuration that belong to no component, such as ``[server]``.

    *Called:* once, when the registry is built. *Since:* 0.1.

    Example::

        @hookimpl
        def trencadis_tables():
            yield ConfigTable(name="replay", config=ReplayConfig)
    """


@hookspec
def trencadis_health_checks() -> Iterable[HealthCheck]:
    """Yield sections of ``trencadis doctor``.

    *Called:* by ``trencadis doctor``, once the configuration is known. *Since:* 0.1.

    Example::

        @hookimpl
        def trencadis_health_checks():
            yield HealthCheck(name="replay", run=check_replay)
    """


@hookspec
def trencadis_placements() -> Iterable[Placement]:
    """Yield places where engines run, outside the process that calls ``LLM`` or ``AsyncLLM``.

    *Called:* when ``[engine] placement`` or ``parallel.data`` asks for one. *Since:* 0.1.

    Example::

        @hookimpl
        def trencadis_placements():
            yield Placement(
                name="pod",
                summary="In a pod of its own.",
                load=lambda: importlib.import_module("my_package.pods"),
            )
    """


# -------------------------------------------------------------------------------------------------- life cycle


@hookspec(historic=True)
def trencadis_configure(config: Any) -> None:
    """See the whole configuration once it is resolved.

    *Called:* once per process, before any component is built; a plugin registered later still gets it.

    Args:
        config: The frozen ``trencadis.config.Config``.
    """


@hookspec
def trencadis_check_lock(file: Path, config: Any, registry: Any) -> None:
    """Refuse a configuration that is not the one of a lock file, by raising a ``PlanLockError``.

    *Called:* where a command is given ``--locked``, before it does anything.

    Args:
        file: The lock file.
        config: The frozen ``trencadis.config.Config``.
        registry: The plugins, all loaded.
    """


@hookspec
def trencadis_engine_ready(model: ModelFacts, plan_hash: str) -> None:
    """Called when an engine is ready for requests, after warm-up.

    *Called:* once per engine, in its process.

    Args:
        model: The loaded model.
        plan_hash: Hash of the resolved plugins, versions and options.
    """


@hookspec
def trencadis_engine_closing() -> None:
    """Called when an engine is about to close.

    *Called:* once per engine, in its process, before the backend is closed.
    """


# ------------------------------------------------------------------------------------------------------ decide


@hookspec(firstresult=True)
def trencadis_select_backend(candidates: tuple[str, ...]) -> str | None:
    """Return the name of the backend to use for ``[backend] name = "auto"``, or None to leave it to others.

    *Called:* once, only if the config says ``auto``. The first answer wins; ``torch`` is used if there is none.

    Args:
        candidates: Names of all registered backends.
    """
    return None
