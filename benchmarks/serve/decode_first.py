"""Decode first: time to the first and to the second token of a prompt that another engine computes, by how it comes back.

``pull`` fetches the blocks when the prefill response is there, and computes the last token of the prompt here. ``token`` takes the first token with
the response and fetches the blocks; ``push and token`` gets the blocks sent along, too. ``pull again`` shows the noise. The engine that
computes prompts is a process of its own; those that generate take turns, each prompt is new to all. The link is as quick as the
machine, or throttled.

    OMP_NUM_THREADS=1 python benchmarks/serve/decode_first.py > benchmarks/results/decode_first.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import socket
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
from support.server.served_process import ServedProcess
from trencadis.client.factory import configure
from trencadis.engine.build import build_engine
from trencadis.records import Request, SamplingParams

WAYS: dict[str, dict[str, bool]] = {
    "pull": {"push": False, "first_token": False},
    "pull again": {"push": False, "first_token": False},
    "token": {"push": False, "first_token": True},
    "push and token": {"push": True, "first_token": True},
}
PATIENCE_S = 120.0
SECRET = "known to both engines"


def decoder(model: str, args: argparse.Namespace, port: int, way: dict[str, bool]) -> Any:
    """Return an engine that lets the one at ``port`` compute its prompts."""
    p2p = {
        "secret": SECRET,
        "prefill_engines": [f"127.0.0.1:{port}"],
        "min_remote_tokens": 32,
        "max_slowdown": 1e9,
        "connect_timeout_s": 30.0,
        "pull_timeout_s": 60.0,
        "prefill_timeout_s": 60.0,
        **way,
    }
    tables = {
        "observer": {"names": []},
        "cache": {"num_blocks": 2 * max(args.prompts) // 16 + 64},
        "kv_connector": {"name": "p2p", "p2p": p2p},
    }
    config, registry = configure(model, config_file=None, tables=tables)
    engine = build_engine(config, registry=registry)
    node = engine.stage("transfer").transfers.connector.strategy._node
    until_s = time.monotonic() + PATIENCE_S
    while not node.registry.ready():
        assert time.monotonic() < until_s, "the other engine does not answer"
        time.sleep(0.01)
    return engine


def token_times_s(engine: Any, prompt: tuple[int, ...]) -> list[float]:
    """Return when each token of an answer was there."""
    sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    start_s, times = time.perf_counter(), []
    slot = engine.add(Request(request_id=str(random.random()), prompt_token_ids=prompt, params=sampling))
    while len(times) < 3:
        deltas = engine.step()
        now_s = time.perf_counter() - start_s
        for one, num in zip(deltas.slots.tolist(), deltas.num_tokens.tolist(), strict=True):
            times += [now_s] * (num if one == slot else 0)
        if engine.is_stalled:
            time.sleep(0.0002)
    while engine.has_work:
        engine.step()
    return times


def rounds(args: argparse.Namespace, model: str, port: int, *, num_tokens: int, bytes_per_s: float) -> dict[str, Any]:
    """Return medians, the best, and quartiles of the ratio to ``pull``, of the first token and of the second."""
    rng = random.Random(num_tokens)
    found: dict[str, list[list[float]]] = {name: [] for name in WAYS}
    with FaultProxy(port) as proxy:
        proxy.to_client.set(bytes_per_s=bytes_per_s)
        at = proxy.port if bytes_per_s else port
        link = {"shared_memory": not bytes_per_s}  # which no link slows down
        engines = {name: decoder(model, args, at, {**link, **way}) for name, way in WAYS.items()}
        try:
            names = list(WAYS)
            for number in range(args.rounds + 1):
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    prompt = tuple(rng.choices(range(10, 250), k=num_tokens))
                    times = token_times_s(engines[name], prompt)
                    if number:  # the first round touches memory that nobody has touched
                        found[name].append(times)
            taken = {name: engine.stage("transfer").first_tokens.results["taken"] for name, engine in engines.items()}
            loads = {name: engine.stage("transfer").transfers.num_loaded for name, engine in engines.items()}
        finally:
            for engine in engines.values():
                engine.close()
    assert set(loads.values()) == {args.rounds + 1}, f"prompts were computed here: {loads}"
    assert [num > 0 for num in taken.values()] == [way["first_token"] for way in WAYS.values()], taken
    return {name: {"first": _told(found, name, 0), "second": _told(found, name, 1)} for name in WAYS}


def _told(found: dict[str, list[list[float]]], name: str, index: int) -> dict[str, Any]:
    values, base = ([times[index] for times in found[one]] for one in (name, "pull"))
    return {
        "median_ms": 1000 * statistics.median(values),
        "best_ms": 1000 * min(values),
        "ratio_quartiles": statistics.quantiles([a / b for a, b in zip(values, base, strict=True)], n=4),
        "saved_ms_quartiles": statistics.quantiles([1000 * (b - a) for a, b in zip(values, base, strict=True)], n=4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help=f"a model, or {RANDOM}")
    parser.add_argument("--prompts", type=int, nargs="+", default=[256, 1024], help="tokens")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mb-per-s", type=float, nargs="+", default=[0.0, 100.0], help="of the link; 0: no limit")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as directory, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        listener.close()
        if args.model == RANDOM:
            make_random_model(directory)
        model = directory if args.model == RANDOM else args.model
        flags = ["--model.path", model, "--engine.role", "prefill", "--cache.num-blocks", str(max(args.prompts) // 4)]
        flags += ["--kv-connector.name", "p2p", "--kv-connector.p2p.port", str(port)]
        flags += ["--kv-connector.p2p.secret", SECRET]
        # An engine that is slow to answer, as all are on a loaded machine, must not count as gone.
        flags += ["--kv-connector.p2p.connect-timeout-s", "30", "--kv-connector.p2p.pull-timeout-s", "60"]
        prefill = ServedProcess(*flags)
        try:
            prefill.wait()
            for rate in args.mb_per_s:
                for num_tokens in args.prompts:
                    one = rounds(args, model, port, num_tokens=num_tokens, bytes_per_s=rate * 1e6)
                    results.append({"prompt": num_tokens, "mb_per_s": rate, **one})
                    print(json.dumps(results[-1]), file=sys.stderr)
        finally:
            prefill.close()
    facts = {"machine": platform.machine(), "cpus": os.cpu_count(), "threads": os.environ.get("OMP_NUM_THREADS")}
    settings = {"model": args.model, "rounds": args.rounds}
    print(json.dumps({**facts, "load": os.getloadavg(), "settings": settings, "results": results}, indent=2))


if __name__ == "__main__":
    main()
