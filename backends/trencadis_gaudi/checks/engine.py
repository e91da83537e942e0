"""Facts about an engine that serves the demo model; the first check serves, later ones read its result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from trencadis.api import Engine, build_engine, load_with_plugins
from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Backend, Component, ComponentContext
from trencadis.records import FinishedSequence, FinishReason, Request, SamplingParams
from trencadis_gaudi.backend import GaudiBackend
from trencadis_gaudi.checks.bench import UNCOUNTED, Bench
from trencadis_gaudi.checks.records import Found
from trencadis_gaudi.config import DEFAULT_BLOCK_SIZE, GaudiConfig

__all__ = ["compiles_nothing", "falls_back_nowhere", "greedy", "ranks_serve", "seeded", "serves"]

_GREEDY: dict[str, Any] = {"temperature": 0.0}
_SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 1}
_REQUESTS = ((_GREEDY, 5), (_GREEDY, 110), (_GREEDY, 60), (_SEEDED, 7), (_SEEDED, 150), (_SEEDED, 90))
"""Sampling parameters and prompt length of each request."""
_MAX_TOKENS = 16
_LEAST_GREEDY, _LEAST_SEEDED = 0.5, 0.25
_NOTHING = Found(None, "not tested: no engine has served")


@attrs.define
class _Served:
    """Result of serving with one engine.

    Attributes:
        tokens: Output tokens of each request.
        num_buckets: Number of prepared buckets.
        num_compilations: Number of compilations after the warm-up.
        fallbacks: Number of calls on the host, by operation.
        errors: Errors of failed requests.
    """

    tokens: list[list[int]]
    num_buckets: int
    num_compilations: int
    fallbacks: dict[str, int] = attrs.field(factory=dict)
    errors: list[str] = attrs.field(factory=list)


class _Plugin:
    """The backend ``gaudi`` under another name, with the metric ``cpu_fallback`` open over its whole life."""

    def __init__(self) -> None:
        self.metric: Any = None
        self._contexts: list[Any] = []

    @hookimpl
    def trencadis_backends(self) -> Iterable[Component]:
        """Yield ``gaudi_check``."""
        yield Component(
            name="gaudi_check", factory=self._make, config=GaudiConfig, summary="As gaudi.", interface_version=1
        )

    def _make(self, config: GaudiConfig, context: ComponentContext) -> Backend:
        backend = GaudiBackend(config, clock=context.clock)
        context_of_metric = backend.habana.hpu.metrics.metric_localcontext("cpu_fallback")
        self.metric = context_of_metric.__enter__()
        self._contexts.append(context_of_metric)
        return backend

    def close(self) -> None:
        """Close the metric."""
        for one in self._contexts:
            one.__exit__(None, None, None)


@contextmanager
def _engine(plugins: Sequence[_Plugin], name: str, options: dict[str, Any], *, num_ranks: int = 1) -> Iterator[Engine]:
    tables: dict[str, Any] = {
        "model": {"path": "demo", "max_model_len": 256},
        "backend": {"name": name, name: options},
        "cache": {"block_size": DEFAULT_BLOCK_SIZE, "num_blocks": 8},
        "engine": {"max_num_seqs": 2, "max_num_batched_tokens": 256},
        "observer": {"names": []},
    }
    if num_ranks > 1:
        tables |= {"executor": {"name": "processes"}, "parallel": {"tensor": num_ranks}}
    resolved, registry = load_with_plugins(environ={}, overrides=tables, extra_plugins=plugins)
    engine = build_engine(resolved.config, registry=registry)
    assert isinstance(engine, Engine), "the demo model generates"
    try:
        yield engine
    finally:
        engine.close()


def _serve(engine: Engine) -> _Served:
    for number, (kind, length) in enumerate(_REQUESTS):
        prompt = tuple(5 + (7 * place + number) % 2000 for place in range(length))
        params = SamplingParams(max_tokens=_MAX_TOKENS, ignore_eos=True, **kind)
        engine.add(Request(request_id=f"check/{number}", prompt_token_ids=prompt, params=params))
    finished: dict[str, FinishedSequence] = {}
    while engine.has_work:
        finished |= {one.request_id: one for one in engine.step().finished}
    return _Served(
        tokens=[finished[f"check/{number}"].token_ids.tolist() for number in range(len(_REQUESTS))],
        num_buckets=len(engine.warm_up.buckets),
        num_compilations=engine.totals.num_compilations,
        errors=[one.error for one in finished.values() if one.finish_reason is FinishReason.ERROR],
    )


def _options(config: GaudiConfig) -> dict[str, Any]:
    return attrs.asdict(attrs.evolve(config, check_model=False, emulated_frozen=False, warmup_required=0))


def ranks_serve(bench: Bench) -> Found:
    """Serve with a model divided over two ranks, each in its own process with its own device; this process opens none."""
    with _engine([], "gaudi", _options(bench.config), num_ranks=2) as engine:
        bench.served = _serve(engine)
    found = _compared(bench, _GREEDY, least=_LEAST_GREEDY)
    served = bench.served
    text = f"{found.text}, {served.num_compilations} programs after the warm-up on both ranks"
    return Found(bool(found.holds) and not served.num_compilations and not served.errors, text)


def serves(bench: Bench) -> Found:
    """Warm up and serve."""
    options = _options(bench.config)
    plugin = _Plugin()
    with _engine([plugin], "gaudi_check", options) as engine:
        num_prepared = len(engine.warm_up.report.prepared)
        served = _serve(engine)
        stats = dict(plugin.metric.stats())
    plugin.close()
    served.fallbacks = stats.get("FallbackOps") or ({"not named": stats["TotalNumber"]} if stats["TotalNumber"] else {})
    text = f"{num_prepared} of {served.num_buckets} buckets prepared, {len(served.tokens)} requests, {len(served.errors)} failed"
    if served.errors:
        return Found(False, f"{text}: {served.errors[0]}")
    bench.served = served
    return Found(num_prepared == served.num_buckets, text)


def _compared(bench: Bench, kind: dict[str, Any], *, least: float) -> Found:
    if bench.served is None:
        return _NOTHING
    if bench.reference is None:
        with _engine([], "torch", {"device": "cpu"}) as engine:
            bench.reference = _serve(engine)
    pairs = [
        (token, expected)
        for number, (of, _) in enumerate(_REQUESTS)
        if of is kind
        for token, expected in zip(bench.served.tokens[number], bench.reference.tokens[number], strict=True)
    ]
    share = sum(token == expected for token, expected in pairs) / len(pairs)
    needed = least if bench.habana.emulated is None else 1.0
    return Found(share >= needed, f"{share:.0%} of {len(pairs)} tokens are equal")


def greedy(bench: Bench) -> Found:
    """Compare greedy tokens."""
    return _compared(bench, _GREEDY, least=_LEAST_GREEDY)


def seeded(bench: Bench) -> Found:
    """Compare seeded random tokens."""
    return _compared(bench, _SEEDED, least=_LEAST_SEEDED)


def compiles_nothing(bench: Bench) -> Found:
    """Read the engine's count of compilations."""
    if bench.served is None or not bench.counts:
        return UNCOUNTED if bench.served else _NOTHING
    return Found(not bench.served.num_compilations, f"{bench.served.num_compilations} programs after the warm-up")


def falls_back_nowhere(bench: Bench) -> Found:
    """Read the engine's count of fallbacks."""
    if bench.served is None:
        return _NOTHING
    fallen = bench.served.fallbacks
    return Found(not fallen, ", ".join(f"{name} {count} times" for name, count in fallen.items()) or "0 fallbacks")
