"""Starts the processes of all replicas and returns the frontend that uses them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import attrs

from trencadis.api import (
    BlockHasher,
    Builder,
    Config,
    Meters,
    Registry,
    load_configured_tokenizer,
    read_prefixes,
    resolve_plan,
)
from trencadis.client.factory import loading
from trencadis.client.frontend import Frontend
from trencadis.clock import Clock, SystemClock
from trencadis.console import on_terminal
from trencadis.errors import ContractError, EngineEndedError
from trencadis.interfaces import ComponentContext
from trencadis.processes import RestartLimit
from trencadis.startup import rare_collections
from trencadis_remote.process.client import RemoteEngineClient
from trencadis_remote.process.connect import end_start_with, open_transport, wait_until_ready
from trencadis_remote.process.transport import Transport
from trencadis_remote.replicas.client import ReplicatedEngineClient
from trencadis_remote.replicas.guarded_router import GuardedRouter
from trencadis_remote.replicas.mover import Mover
from trencadis_remote.replicas.routing import Routing
from trencadis_remote.replicas.starter import ReplicaStarter

__all__ = ["connect_replicas", "make_mover", "make_router", "make_routing"]

_LOOK_S = 0.2


def connect_replicas(
    config: Config, registry: Registry, *, show_progress: bool | None = None, never_waits: bool = False
) -> Frontend:
    """Start ``parallel.data`` engines side by side, load the tokenizer meanwhile, and return the frontend.

    Args:
        config: The configuration.
        registry: The plugins.
        show_progress: Draw a bar for all; None: on a terminal only.
        never_waits: See :func:`~trencadis_remote.process.connect.connect_frontend`.

    Raises:
        PluginError: The router cannot be built, or a plugin that was given in code cannot travel to another process.
        TrencadisError: The error of a replica; the others are ended.
        EngineEndedError: A replica died before it was ready.
    """
    router = make_router(config, registry)
    start = functools.partial(_start, config, registry, never_waits=never_waits)
    transports: list[Transport] = []
    try:
        with loading(config, lambda: _part(transports), show=show_progress) as advance:
            transports.extend(map(start, range(config.parallel.data)))
            with rare_collections():
                tokenizer = load_configured_tokenizer(config)  # while the children import and load
            shows = on_terminal() if show_progress is None else show_progress
            look = (lambda: advance(*_progress(transports))) if shows else None
            ready = [wait_until_ready(one, look) for one in transports]
            clients = list(map(RemoteEngineClient, transports, ready))
            end_start_with(config, ready)
        return Frontend(_client(config, clients, router, start), tokenizer)
    except BaseException:
        for transport in transports:
            transport.failure = transport.failure or "not every replica was ready."
            transport.close()
        raise


def make_router(config: Config, registry: Registry, *, clock: Clock | None = None) -> GuardedRouter:
    """Return the configured router, guarded.

    Args:
        config: Configuration of ``parallel.data`` replicas.
        registry: The plugins.
        clock: Measures its calls; the system's if none is given.

    Raises:
        PluginError: It cannot be chosen or built.
    """
    clock = clock or SystemClock()
    plan = resolve_plan(config, registry)
    context = ComponentContext(clock=clock, seed=config.engine.seed, num_replicas=config.parallel.data)

    label, router, make_fallback = Builder(registry, plan, config, context).guarded("router")
    return GuardedRouter(label, router, make_fallback, meter=Meters(config, clock)("router", label))


def make_routing(
    config: Config, router: GuardedRouter, *, hashing: tuple[str, int] | None, clock: Clock | None = None
) -> Routing:
    """Return what shows requests and replicas to a router.

    Args:
        config: Configuration of ``parallel.data`` replicas.
        router: Chooses.
        hashing: ``Engine.hashing`` of a replica.
        clock: Says when to look again whether replicas make progress; the system's if none is given.
    """
    hasher = None
    if hashing is not None:
        compatibility, block_size = hashing
        hasher = BlockHasher(
            key=config.cache.key,
            compatibility=compatibility,
            block_size=block_size,
            shared_prefixes=read_prefixes(config),
        )
    return Routing(router, num_replicas=config.parallel.data, clock=clock or SystemClock(), hasher=hasher)


def make_mover(config: Config, router: GuardedRouter, routing: Routing, *, clock: Clock | None = None) -> Mover | None:
    """Return what moves requests between replicas; None if the router moves none, or the configuration lets it move none.

    Args:
        config: Configuration of ``parallel.data`` replicas.
        router: Router of :func:`make_router`.
        routing: Routing of :func:`make_routing`.
        clock: Measures the router's period; the system's if none is given.

    Raises:
        ContractError: The router's period is no positive number.
    """
    period_s, limits = router.moves_period_s, config.router
    if period_s == math.inf or not limits.max_moves or not limits.max_moves_per_s:
        return None
    if not period_s > 0:
        raise ContractError(f"{router.label}: moves_period_s = {period_s!r} is no positive number of seconds.")
    return Mover(router, routing, limits, num_replicas=config.parallel.data, clock=clock or SystemClock())


def _start(config: Config, registry: Registry, replica: int, *, never_waits: bool) -> Transport:
    own = attrs.evolve(config, parallel=attrs.evolve(config.parallel, replica=replica))
    return open_transport(own, registry, never_waits=never_waits, sends_load=True)


def _client(
    config: Config, clients: list[RemoteEngineClient], router: GuardedRouter, start: Callable[[int], Transport]
) -> ReplicatedEngineClient:
    """Return the client of replicas that are ready."""
    clock, parallel = SystemClock(), config.parallel
    routing = make_routing(config, router, hashing=clients[0].hashing, clock=clock)
    return ReplicatedEngineClient(
        clients,
        routing=routing,
        mover=make_mover(config, router, routing, clock=clock),
        starter=ReplicaStarter(functools.partial(_start_again, start)),
        make_limit=lambda: RestartLimit(
            max_restarts=parallel.max_restarts, window_s=parallel.restart_window_s, now_s=clock.now_s
        ),
    )


def _start_again(start: Callable[[int], Transport], replica: int, is_closing: Callable[[], bool]) -> RemoteEngineClient:
    """Start one replica and return its client when it is ready."""
    transport = start(replica)

    def look() -> None:
        if is_closing():
            raise EngineEndedError("the engine was closed.")

    try:
        return RemoteEngineClient(transport, wait_until_ready(transport, look))
    except BaseException:
        transport.failure = transport.failure or "the replica was not ready."
        transport.close()
        raise


def _progress(transports: list[Transport]) -> tuple[int, int | None]:
    """Return how many buckets all replicas have prepared, and how many there are, once each knows."""
    readings = [one.progress for one in transports]
    totals = [total for _, total in readings if total is not None]
    return sum(done for done, _ in readings), sum(totals) if len(totals) == len(readings) else None


def _part(transports: list[Transport]) -> str:
    """Return which part of loading the replica runs that has prepared the fewest buckets."""
    slowest = min(transports, key=lambda one: one.progress[0], default=None)
    return "starting" if slowest is None else slowest.part or "starting"
