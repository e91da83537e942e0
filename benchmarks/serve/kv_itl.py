"""ITL of a request that decodes while the prefixes of others are loaded, against the same while they lie in the engine's own cache.

What is left between the two is the loading. Both are measured on one engine, whose cache is emptied before what is to be loaded: two
engines differ by some percent already, for their memory lies elsewhere. All kinds take turns:

    cached, cached again    from its own cache; the second shows the noise (A/A)
    worked                  the same, and beside it another process computes for as long as the next one copies, within its caches
    copied                  the same, and beside it another process copies as many bytes once, within --load-s
    loaded                  through the connector

Others come as often with each kind: every so many tokens, but not sooner than --load-s, in which a load should be over.

Linux says what the thread of a step did meanwhile, so that three causes can be told apart, in ms of each step:

    cpu      it computed: more of it means that it ran slower, for memory and caches are shared
    queue    it could run, and no processor was free
    blocked  neither: it waited for Python's lock

``own`` is a step's ``cpu`` and ``blocked``, of all rounds together: on a machine that does other things as well, that is what is left of
a comparison, as far as these do not interrupt a thread between two looks at its clocks. ``p50`` and ``p95`` are of the time between two
tokens, by round, as a client sees it.

``beside`` tells more than two runs can, whose machine is not the same: by how much the steps of one run that a load worked beside were
longer than its other steps, ms for one load, in all of them together.

A run in which a load was given up is made once more, twice at most; ``num_failed`` says how many loads were.

``p2p`` pulls from an engine in another process on the same machine, whose work is part of what is measured.

    OMP_NUM_THREADS=1 python benchmarks/serve/kv_itl.py --connectors p2p --rounds 41 --out benchmarks/results/kv_itl_p2p.json
    redis-server --port 7379 --save '' --maxmemory 4gb --maxmemory-policy allkeys-lfu &
    python benchmarks/serve/kv_itl.py --connectors redis --redis-url redis://127.0.0.1:7379
    python benchmarks/serve/kv_itl.py --variant unpaced load_share=1.0     # a setting of the connectors against the default
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import random
import resource
import statistics
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import attrs
from kv_itl_sides import Control, Producer, engine_of, serve
from kv_ttft import RANDOM, make_random_model

from trencadis.records import Request, SamplingParams

KINDS = ("cached", "cached again", "worked", "copied", "loaded")
LOADERS = ("trencadis-kv-load", "trencadis-p2p-pull")
TRIES = 3
RETRY_S = 6.0
"""So long nothing is loaded from a store that was too slow once."""
WORK_MS = 0.05
"""A thread that waits for a rest to end computes less within a step."""


class NotLoadedError(Exception):
    """A load was given up: what was measured is of something else."""


def learn(engine: Any, args: argparse.Namespace) -> None:
    """Let an engine find out what computing takes: longer loads than that it would not order, and an engine's first prompts take longest."""
    others = random.Random(2)
    for _ in range(args.computed):
        serve(engine, tuple(others.choices(range(1000, 4000), k=args.load_tokens)))
    time.sleep(2.0)  # who has much to save drops what comes next


def times_of(threads: Sequence[int | None]) -> tuple[float, float]:
    """Return ms that threads ran, and that they waited for a processor.

    Source: Linux, Documentation/scheduler/sched-stats.rst, /proc/<pid>/schedstat.
    """
    found = [Path(f"/proc/self/task/{thread}/schedstat").read_text().split() for thread in threads]
    return sum(int(one[0]) for one in found) / 1e6, sum(int(one[1]) for one in found) / 1e6


@attrs.frozen
class Step:
    """What the thread of one step did, ms.

    Attributes:
        cpu_ms: It computed.
        queue_ms: It waited for a processor.
        blocked_ms: It waited for anything else.
        loader_ms: Threads that load computed meanwhile.
    """

    cpu_ms: float
    queue_ms: float
    blocked_ms: float
    loader_ms: float

    @property
    def own_ms(self) -> float:
        return self.cpu_ms + self.blocked_ms


class Steps:
    """An engine's steps on the thread that runs them.

    Attributes:
        found: Since it was cleared.
    """

    def __init__(self, engine: Any) -> None:
        self._run = engine._executor._run
        self.found: list[Step] = []
        engine._executor._run = self.run

    def run(self, *arguments: Any) -> Any:
        thread, loaders = [threading.get_native_id()], loader_ids()
        loaded_ms = times_of(loaders)[0]
        start_s, cpu_s, queue_ms = time.perf_counter(), time.thread_time(), times_of(thread)[1]
        try:
            return self._run(*arguments)
        finally:
            queue_ms = times_of(thread)[1] - queue_ms
            cpu_ms, wall_ms = 1000 * (time.thread_time() - cpu_s), 1000 * (time.perf_counter() - start_s)
            loader_ms = times_of(loaders)[0] - loaded_ms
            self.found.append(Step(cpu_ms, queue_ms, wall_ms - cpu_ms - queue_ms, loader_ms))


def loader_ids() -> list[int | None]:
    """Return the threads of this process that load."""
    return [one.native_id for one in threading.enumerate() if one.name.startswith(LOADERS)]


def beside_ms(steps: Sequence[Step]) -> float:
    """Return how much longer the steps took, in all, that somebody loaded beside, than as many of the others."""
    beside = [one.own_ms for one in steps if one.loader_ms >= WORK_MS]
    others = [one.own_ms for one in steps if one.loader_ms < WORK_MS]
    return sum(beside) - len(beside) * statistics.median(others) if beside else 0.0


def measured(
    engine: Any,
    steps: Steps,
    prefix: tuple[int, ...],
    held: Sequence[dict[str, Any] | None],
    args: argparse.Namespace,
    begin: Callable[[], None],
) -> dict[str, Any]:
    """Return the times between the tokens of a request that decodes, while others come with a known prefix.

    ``held`` says where each of them is to load it from, if not from the connector's store; empty: all find it in the engine's own cache.
    One that comes sooner than ``load_s`` after another one, or while that still waits for its prefix, waits that long.
    """
    num_loaded = engine.stage("transfer").transfers.num_loaded
    params = SamplingParams(max_tokens=args.gaps + 2, temperature=0.0, ignore_eos=True)
    slot = engine.add(Request(request_id="decodes", prompt_token_ids=(5, 6, 7), params=params))
    engine.step()
    steps.found.clear()
    loaders = loader_ids()
    loading, faults = times_of(loaders), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    gaps, last_s, number, came_s, waits = [], time.perf_counter(), 0, 0.0, []
    while len(gaps) < args.gaps:
        is_due = len(gaps) >= args.every * number + 4 and time.perf_counter() >= came_s + args.load_s
        if is_due and len(waits) == number:  # nobody finds what another one loads
            if held:
                engine._state.blocks.reset_cache()
            one, came_s = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), time.perf_counter()
            prompt, more = (*prefix, 900 + number), {"transfer_params": held[number]} if held else {}
            engine.add(Request(request_id=f"other {number}", prompt_token_ids=prompt, params=one, **more))
            number += 1
            begin()
        deltas = engine.step()
        now_s = time.perf_counter()
        waits += [now_s - came_s for end in deltas.finished if end.request_id.startswith("other")]
        if slot in deltas.slots:
            gaps.append(1000 * (now_s - last_s))
            last_s = now_s
    loaded, found = times_of(loaders), list(steps.found)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    while engine.has_work:
        engine.step()
    num_loaded = engine.stage("transfer").transfers.num_loaded - num_loaded
    if num_loaded != (number if held else 0):
        raise NotLoadedError(f"{num_loaded} of {number} prefixes were loaded")
    quantiles = statistics.quantiles(gaps, n=100)
    return {
        "p50_ms": quantiles[49],
        "p95_ms": quantiles[94],
        "mean_ms": statistics.fmean(gaps),
        "cpu_ms": statistics.fmean(one.cpu_ms for one in found),
        "queue_ms": statistics.fmean(one.queue_ms for one in found),
        "blocked_ms": statistics.fmean(one.blocked_ms for one in found),
        "beside_ms": beside_ms(found) / number,
        "faults": faults / args.gaps,
        "loader_cpu_ms": (loaded[0] - loading[0]) / number,
        "loader_queue_ms": (loaded[1] - loading[1]) / number,
        "first_token_ms": 1000 * statistics.median(waits) if waits else 0.0,
        "own": [one.own_ms for one in found],
    }


def compared(runs: dict[str, Callable[[str], dict[str, Any]]], args: argparse.Namespace) -> dict[str, Any]:
    """Return medians, and quartiles of the ratios to an engine's own cache, by name, kind and measure; all take turns.

    Their order changes from round to round: what comes after one that loads finds other things in the caches.
    """
    order = random.Random(3)
    turns = [(name, kind) for name in runs for kind in KINDS]
    found: dict[tuple[str, str], list[dict[str, Any]]] = {turn: [] for turn in turns}
    until_s = time.monotonic() + args.max_seconds
    for number in range(args.rounds + 1):
        if number > 2 and time.monotonic() > until_s:
            break
        for name, kind in order.sample(turns, k=len(turns)):
            one = runs[name](kind)
            if number:  # the first round touches memory that nobody has touched
                found[name, kind].append(one)
    return {name: {kind: measures(found[name, kind], found[name, KINDS[0]]) for kind in KINDS} for name in runs}


def measures(values: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return all measures of the rounds of one kind, against others of the same rounds."""
    own = statistics.quantiles([step for value in values for step in value["own"]], n=100)
    return {
        "rounds": len(values),
        "own_ms": {"p50": own[49], "p90": own[89], "p95": own[94], "p99": own[98]},
        **{
            measure: summary([one[measure] for one in values], [one[measure] for one in base])
            for measure in values[0]
            if measure != "own"
        },
    }


def summary(values: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """Return the median and the mean of values by round, and the quartiles of their ratios to others."""
    ratios = [one / other for one, other in zip(values, base, strict=True)] if all(base) else []
    return {
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "ratio_quartiles": statistics.quantiles(ratios, n=4) if ratios else None,
        "ratio_interval": interval_of_median(ratios) if ratios else None,
    }


def interval_of_median(values: Sequence[float]) -> list[float]:
    """Return an interval that holds the median with a probability of at least 95 %, whatever the distribution; of six or more.

    Each value is as likely below the median as above, so how many are below is binomial.
    Source: Conover, Practical Nonparametric Statistics, 3rd ed., 3.2.
    """
    ordered, count, below = sorted(values), len(values), 0
    while 2 * sum(math.comb(count, k) for k in range(below + 1)) / 2**count <= 0.05:
        below += 1
    below = max(0, below - 1)
    return [ordered[below], ordered[count - 1 - below]]


def decoding(args: argparse.Namespace, model: str, connector: str) -> dict[str, Any]:
    """Return the measures of an engine with one connector, and of others with other settings of it."""
    prefix = tuple(random.Random(1).choices(range(1000, 4000), k=args.load_tokens))
    number = -(-args.gaps // args.every)  # at most
    with tempfile.TemporaryDirectory() as directory:
        own = {"filesystem": {"path": f"{directory}/blocks"}, "redis": {"url": args.redis_url}}.get(connector, {})
        engines = {
            name: engine_of(args, model, connector, {**own, **more})
            for name, more in {"as configured": {}, **args.variants}.items()
        }
        producer = Producer(args, model, prefix) if connector == "p2p" else None
        beside = Control(args.load_mb << 20, args.load_s)
        steps = {name: Steps(engine) for name, engine in engines.items()}

        def run(name: str, kind: str) -> dict[str, Any]:
            for _ in range(TRIES - 1):  # a virtual machine that stops for a third of a second lets a load miss its time
                with contextlib.suppress(NotLoadedError):
                    return run_once(name, kind)
                time.sleep(RETRY_S)
            return run_once(name, kind)

        def run_once(name: str, kind: str) -> dict[str, Any]:
            # Done where nothing is pulled, too: the engine is idle meanwhile, and the first steps after a pause are slow.
            held = producer.hold(number) if producer else [None] * number
            begin = partial(beside.begin, kind)
            return measured(engines[name], steps[name], prefix, held if kind == "loaded" else [], args, begin)

        try:
            for engine in engines.values():
                learn(engine, args)
                serve(engine, (*prefix, 9))
            time.sleep(1.0)  # the last blocks are being written
            results = compared({name: partial(run, name) for name in engines}, args)
            return {
                **results,
                "num_failed": {name: one.stage("transfer").transfers.num_failed_loads for name, one in engines.items()},
            }
        finally:
            for engine in engines.values():
                engine.close()
            beside.close()
            if producer is not None:
                producer.close()


class Variant(argparse.Action):
    """``NAME KEY=VALUE ...``, values as in TOML."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        name, *settings = values
        namespace.variants = {**namespace.variants, name: tomllib.loads("\n".join(settings))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=RANDOM, help=f"{RANDOM}: made for this; or any other")
    parser.add_argument("--connectors", default="filesystem,p2p", metavar="A,B,...")
    parser.add_argument("--redis-url", default="redis://127.0.0.1:7379", metavar="URL")
    parser.add_argument("--variant", dest="variants", nargs="+", action=Variant, default={}, help="NAME KEY=VALUE ...")
    parser.add_argument("--load-tokens", type=int, default=1024, help="of a prefix that is loaded while others decode")
    parser.add_argument("--load-mb", type=int, default=72, help="MiB of it, for who only copies as many")
    parser.add_argument("--load-s", type=float, default=0.9, help="seconds that it takes, for the same")
    parser.add_argument("--computed", type=int, default=12, help="prompts that each engine computes before")
    parser.add_argument("--gaps", type=int, default=136, help="tokens of the request that decodes meanwhile")
    parser.add_argument("--every", type=int, default=16, help="tokens between two loads")
    parser.add_argument(
        "--blocks", type=int, default=192, help="of each engine; the first round touches so much memory"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--max-seconds", type=float, default=1e9, help="of one connector; no round begins later")
    parser.add_argument("--out", help="write here, too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = args.model
        if model == RANDOM:
            make_random_model(directory)
            model = directory
        results = {connector: decoding(args, model, connector) for connector in args.connectors.split(",")}
    facts = {"machine": platform.machine(), "cpus": os.cpu_count(), "python": platform.python_version()}
    settings = {**vars(args), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"), "load": os.getloadavg()}
    text = json.dumps({**facts, "settings": settings, "results": results}, indent=2)
    print(text)
    if args.out:
        Path(args.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
