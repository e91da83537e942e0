"""What KV connectors save and cost: a long prefix loaded against computed, and misses. What loads cost others: ``kv_itl.py``.

``first token``: as ``trencadis bench kv``, on a random Llama of 110 M parameters. ``misses``: CPU time of prompts that nobody has seen,
against an engine without connector and without prefix cache. All in interleaved pairs, each with a pair of equal engines beside it
(A/A), which shows the noise.

    python benchmarks/serve/kv_ttft.py --connectors host_offload,filesystem,p2p > benchmarks/results/kv_ttft.json
    redis-server --port 7379 --save '' --maxmemory 4gb --maxmemory-policy allkeys-lfu &
    python benchmarks/serve/kv_ttft.py --connectors redis --redis-url redis://127.0.0.1:7379
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import os
import platform
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from trencadis.client.factory import configure
from trencadis.engine.build import build_engine
from trencadis.records import Request, SamplingParams
from trencadis_tools.bench import KVWorkload, measure_kv

RANDOM = "random_110m"
BLOCKS = 640


def make_random_model(directory: str) -> None:
    """Write a Llama of 110 M random weights with the demo model's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(str(importlib.resources.files("trencadis") / "demo" / "target"), directory, dirs_exist_ok=True)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def tables_of(args: argparse.Namespace, connector: str, directory: str, **cache: Any) -> dict[str, Any]:
    """Return the configuration of an engine."""
    more: dict[str, Any] = {"redis": {"url": args.redis_url}} if args.redis_url else {}
    more["p2p"] = {"secret": "known to this engine"}
    return {
        "observer": {"names": []},
        "cache": {"num_blocks": BLOCKS, **cache},
        "kv_policy": {"name": "always"},
        "kv_connector": {"name": connector, "filesystem": {"path": f"{directory}/blocks"}, **more},
    }


def engine_of(args: argparse.Namespace, model: str, connector: str, directory: str, **cache: Any) -> Any:
    config, registry = configure(model, config_file=None, tables=tables_of(args, connector, directory, **cache))
    return build_engine(config, registry=registry)


def serve(engine: Any, prompts: Sequence[tuple[int, ...]], *, max_tokens: int) -> float:
    """Serve prompts at once; returns CPU seconds of this process."""
    start_s = time.process_time()
    for prompt in prompts:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        engine.add(Request(request_id=f"{len(prompt)} {hash(prompt)}", prompt_token_ids=prompt, params=params))
    while engine.has_work:
        engine.step()
    return time.process_time() - start_s


def paired(runs: dict[str, Callable[[], dict[str, float]]], rounds: int) -> dict[str, dict[str, Any]]:
    """Return, by name and measure, the median and the quartiles of the ratio to the first, in rounds in which all take turns."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found[name].append(runs[name]())
    base = found[names[0]]
    return {
        name: {
            measure: {
                "median": statistics.median(one[measure] for one in values),
                "ratio_quartiles": statistics.quantiles(
                    [one[measure] / other[measure] for one, other in zip(values, base, strict=True)], n=4
                ),
            }
            for measure in base[0]
        }
        for name, values in found.items()
    }


def misses(args: argparse.Namespace, model: str, connector: str) -> dict[str, Any]:
    """Return CPU seconds of prompts that nobody has seen."""
    rng = random.Random(2)
    with tempfile.TemporaryDirectory() as directory:
        engines = {
            "nothing": engine_of(args, model, "none", directory, prefix_caching=False),
            "nothing again": engine_of(args, model, "none", directory, prefix_caching=False),
            "prefix cache": engine_of(args, model, "none", directory),
            "connector and prefix cache": engine_of(args, model, connector, directory),
        }

        def run(engine: Any) -> dict[str, float]:
            prompts = [tuple(rng.choices(range(1000, 4000), k=256)) for _ in range(4)]
            return {"cpu_s": serve(engine, prompts, max_tokens=16)}

        try:
            # Every block once: with a prefix cache each prompt takes memory that nobody has touched until the cache is full.
            for _ in range(BLOCKS * 16 // (4 * 256) + 1):
                for engine in engines.values():
                    run(engine)
            runs = {name: (lambda engine=engine: run(engine)) for name, engine in engines.items()}
            return paired(runs, args.rounds)
        finally:
            for engine in engines.values():
                engine.close()


def first_token(args: argparse.Namespace, model: str, connector: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        # As few blocks as will do: memory that nobody touched yet costs who touches it first more than a load does.
        tables = tables_of(args, connector, directory, num_blocks=0)
        config, registry = configure(model, config_file=None, tables=tables)
        workload = KVWorkload(num_tokens=args.tokens, num_pairs=args.pairs)
        (result,) = measure_kv(config, registry, workload, connectors=[connector])
    return attrs.asdict(result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=RANDOM, help=f"{RANDOM}: made for this; or any other")
    parser.add_argument("--connectors", default="none,host_offload,filesystem,p2p", metavar="A,B,...")
    parser.add_argument("--redis-url", default="", metavar="URL")
    parser.add_argument("--measure", nargs="*", default=["first_token", "misses"])
    parser.add_argument("--tokens", type=int, default=4096, help="of the prefix that is loaded or computed")
    parser.add_argument("--pairs", type=int, default=3, help="of first tokens")
    parser.add_argument("--rounds", type=int, default=6, help="of misses")
    args = parser.parse_args()
    measures = {"first_token": first_token, "misses": misses}
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        model = args.model
        if model == RANDOM:
            make_random_model(directory)
            model = directory
        for connector in args.connectors.split(","):
            stores = connector not in ("none", "p2p")  # which loads nothing that nobody names
            results[connector] = {
                name: measures[name](args, model, connector) for name in args.measure if stores or name == "first_token"
            }
    facts = {"machine": platform.machine(), "cpus": os.cpu_count(), "python": platform.python_version()}
    settings = {**vars(args), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"), "load": os.getloadavg()}
    print(json.dumps({**facts, "settings": settings, "results": results}, indent=2))


if __name__ == "__main__":
    main()
