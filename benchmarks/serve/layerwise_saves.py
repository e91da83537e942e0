"""How long copying blocks out holds up the steps of a prompt: all layers before the step against each layer in its turn.

Engines of one process save to host memory with ``host_offload``: ``whole``, ``by layer``, and ``whole again`` for the noise, by turns. Of
each prompt: the time in ``begin_step``, in which no layer can begin; that in ``wait_layer``; CPU time of the backend's thread; and wall
time from the prompt to its first token.

    OMP_NUM_THREADS=1 python benchmarks/serve/layerwise_saves.py --model demo > benchmarks/results/layerwise_saves.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from kv_ttft import RANDOM, make_random_model

from trencadis.client.factory import configure
from trencadis.engine.build import build_engine
from trencadis.records import Request, SamplingParams
from trencadis_kv.store.store_worker import StoreWorker

SPENT_S = {"begin_step": 0.0, "wait_layer": 0.0, "thread_cpu": 0.0}
"""Of the prompt under way; engines take turns, so one is enough."""


def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of the worker side that adds to :data:`SPENT_S`; ``begin_step`` and ``end_step`` frame the thread's time."""

    def method(*args: Any, **options: Any) -> Any:
        if name == "begin_step":
            SPENT_S["thread_cpu"] -= time.thread_time()
        start_s = time.perf_counter()
        result = call(*args, **options)
        if name in SPENT_S:
            SPENT_S[name] += time.perf_counter() - start_s
        if name == "end_step":
            SPENT_S["thread_cpu"] += time.thread_time()
        return result

    return method


def engine_of(model: str, args: argparse.Namespace, *, layerwise_saves: bool) -> Any:
    """Return an engine that saves whatever it computes, and finds nothing."""
    tables = {
        "observer": {"names": []},
        "engine": {"max_num_batched_tokens": args.chunk, "warmup": False},
        "cache": {"num_blocks": args.prompt // 16 + 64, "prefix_caching": False},
        "kv_connector": {
            "name": "host_offload",
            "host_offload": {
                "layerwise_saves": layerwise_saves,
                "loads": False,
                "staging_bytes": 1 << 30,
                "capacity_bytes": 256 << 20,
            },
        },
    }
    config, registry = configure(model, config_file=None, tables=tables)
    return build_engine(config, registry=registry)


def serve(engine: Any, prompt: tuple[int, ...]) -> dict[str, float]:
    """Return what was spent on a prompt, milliseconds."""
    SPENT_S.update(dict.fromkeys(SPENT_S, 0.0))
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    start_s = time.perf_counter()
    engine.add(Request(request_id=str(random.random()), prompt_token_ids=prompt, params=params))
    while engine.has_work:
        engine.step()
    wall_s = time.perf_counter() - start_s
    time.sleep(0.2)  # what is still being written is not the next engine's to wait for
    return {name: 1000 * seconds for name, seconds in {**SPENT_S, "wall": wall_s}.items()}


def measure(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """Return medians of each kind, and the quartiles of their ratios to ``whole`` of the same round."""
    engines = {
        name: engine_of(model, args, layerwise_saves=name == "by layer")
        for name in ("whole", "by layer", "whole again")
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    names, rng = list(engines), random.Random(0)
    try:
        for number in range(args.rounds + 1):
            for name in names[number % 3 :] + names[: number % 3]:
                spent = serve(engines[name], tuple(rng.choices(range(10, 250), k=args.prompt)))
                if number:  # the first round touches memory that nobody has touched
                    found[name].append(spent)
    finally:
        for engine in engines.values():
            engine.close()
    return {
        name: {
            "median_ms": {key: round(statistics.median(one[key] for one in values), 2) for key in values[0]},
            "ratio_quartiles": {
                key: statistics.quantiles(
                    [one[key] / base[key] for one, base in zip(values, found["whole"], strict=True)], n=4
                )
                for key in ("begin_step", "thread_cpu", "wall")
            },
        }
        for name, values in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help=f"a model, or {RANDOM}")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a step")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    for name in ("begin_step", "wait_layer", "end_step"):
        setattr(StoreWorker, name, timed(name, getattr(StoreWorker, name)))
    with tempfile.TemporaryDirectory() as directory:
        if args.model == RANDOM:
            make_random_model(directory)
        results = measure(args, directory if args.model == RANDOM else args.model)
    facts = {"machine": platform.machine(), "cpus": os.cpu_count(), "threads": os.environ.get("OMP_NUM_THREADS")}
    print(json.dumps({**facts, "load": os.getloadavg(), "settings": vars(args), "results": results}, indent=2))


if __name__ == "__main__":
    main()
