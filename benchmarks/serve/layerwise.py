"""Time to the first token of a long prefix that another engine holds, and some hundred tokens after it: waiting for remote KV against by layer.

Engines of one process hand prefixes over through real sockets, with the connector ``p2p``. ``waiting`` waits for the whole prefix, ``by
layer`` computes the rest meanwhile, ``waiting again`` shows the noise; all take turns. The link is as quick as the machine, or throttled.

    OMP_NUM_THREADS=1 python benchmarks/serve/layerwise.py --model demo > benchmarks/results/layerwise.json
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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

from kv_ttft import RANDOM, make_random_model

from support.faultproxy import FaultProxy
from trencadis.client.factory import configure
from trencadis.engine.build import build_engine
from trencadis.records import FinishedSequence, Request, SamplingParams


def engine_of(model: str, args: argparse.Namespace, **p2p: Any) -> Any:
    """Return an engine with the connector."""
    tables = {
        "observer": {"names": []},
        "engine": {"max_num_batched_tokens": args.prefix},
        "cache": {"num_blocks": 2 * (args.prefix + max(args.suffixes)) // 16 + 64, "layer_wait_s": 10.0},
        "kv_connector": {
            "name": "p2p",
            "p2p": {
                "secret": "known to both engines",
                "peers": ["127.0.0.1:*"],
                "pull_timeout_s": 60.0,
                "shared_memory": False,
                **p2p,
            },
        },
    }
    config, registry = configure(model, config_file=None, tables=tables)
    return build_engine(config, registry=registry)


def first_token_s(engine: Any, prompt: tuple[int, ...], params: Any) -> tuple[float, FinishedSequence]:
    """Return what the first token of a prompt takes."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    request = Request(request_id=str(random.random()), prompt_token_ids=prompt, params=sampling, transfer_params=params)
    start_s = time.perf_counter()
    engine.add(request)
    while True:
        for end in engine.step().finished:
            return time.perf_counter() - start_s, end
        if engine.is_stalled:
            time.sleep(0.0002)


def rounds(args: argparse.Namespace, model: str, *, suffix: int, bytes_per_s: float) -> dict[str, Any]:
    """Return medians, the best, and quartiles of the ratio to ``waiting``."""
    rng, producer = random.Random(suffix), engine_of(model, args)
    consumers = {
        "waiting": engine_of(model, args),
        "waiting again": engine_of(model, args),
        "by layer": engine_of(model, args, layerwise=True),
    }
    found: dict[str, list[float]] = {name: [] for name in consumers}
    names, num_discarded = list(consumers), 0
    try:
        for number in range(args.rounds + 1):
            for name in names[number % 3 :] + names[: number % 3]:
                prefix = tuple(rng.choices(range(10, 250), k=args.prefix))
                prompt = (*prefix, *rng.choices(range(10, 250), k=suffix))
                _, held = first_token_s(producer, (*prefix, 9), {"do_remote_decode": True})
                params = dict(held.transfer_params or {})
                with FaultProxy(params["remote_port"]) as proxy:
                    if bytes_per_s:
                        proxy.to_client.set(bytes_per_s=bytes_per_s)
                        params["remote_port"] = proxy.port
                    seconds, end = first_token_s(consumers[name], prompt, params)
                assert end.num_cached_tokens == args.prefix // 16 * 16, "it was not pulled"
                if number:  # the first round touches memory that nobody has touched
                    found[name].append(seconds)
                for engine in (consumers[name], producer):
                    while engine.has_work:
                        engine.step()
        num_discarded = consumers["by layer"].stage("transfer").transfers.layered.num_discarded
    finally:
        for engine in (producer, *consumers.values()):
            engine.close()
    base = found["waiting"]
    return {
        "num_discarded": num_discarded,
        **{
            name: {
                "median_ms": 1000 * statistics.median(values),
                "best_ms": 1000 * min(values),
                "ratio_quartiles": statistics.quantiles([a / b for a, b in zip(values, base, strict=True)], n=4),
            }
            for name, values in found.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help=f"a model, or {RANDOM}")
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--suffixes", type=int, nargs="+", default=[16, 256, 512])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mb-per-s", type=float, nargs="+", default=[0.0, 20.0], help="of the link; 0: no limit")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as directory:
        if args.model == RANDOM:
            make_random_model(directory)
        model = directory if args.model == RANDOM else args.model
        for rate in args.mb_per_s:
            for suffix in args.suffixes:
                one = rounds(args, model, suffix=suffix, bytes_per_s=rate * 1e6)
                results.append({"suffix": suffix, "mb_per_s": rate, **one})
                print(json.dumps(results[-1]), file=sys.stderr)
    facts = {"machine": platform.machine(), "cpus": os.cpu_count(), "threads": os.environ.get("OMP_NUM_THREADS")}
    settings = {"model": args.model, "prefix": args.prefix, "rounds": args.rounds}
    print(json.dumps({**facts, "load": os.getloadavg(), "settings": settings, "results": results}, indent=2))


if __name__ == "__main__":
    main()
