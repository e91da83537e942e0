"""Measures the share of prompt tokens found in the prefix cache of the chosen replica, by router, with two real engines.

    python benchmarks/serve/router_live.py [--requests 290] [--rounds 3] > benchmarks/results/router_live.json

Mooncake's multi-turn trace (FAST'25, Apache-2.0, from ``../shared/data/traces``), cut short: of its conversations every sixteenth, a block
of 512 tokens becomes one of 16, and a prompt has at most 60 of these. Requests are sent in the order of the trace, eight at a time. Each
replica caches 16,384 tokens.
Tokens found are those that the engines count. Rounds take turns, in changing order; each begins with empty caches.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

from trencadis import AsyncLLM, SamplingParams

TRACE = Path(__file__).parents[3] / "shared" / "data" / "traces" / "mooncake_fast25_synthetic.jsonl"
ROUTERS = ("least_loaded", "prefix_affinity")
BLOCK_TOKENS = 16
MOST_BLOCKS = 60
CACHE_BLOCKS = 1024
EVERY = 16
NUM_CLIENTS = 8
VOCABULARY = 1000


def prompts(count: int, trace: Path) -> list[list[int]]:
    """Return prompts whose prefixes are shared as in the trace."""
    made = []
    with trace.open() as lines:
        for line in lines:
            ids = json.loads(line)["hash_ids"][:MOST_BLOCKS]
            if ids[0] % EVERY:
                continue
            # One token more than whole blocks: the last token of a prompt is always computed.
            made.append([token for number in ids for token in block(number)] + [len(made) % VOCABULARY])
            if len(made) == count:
                break
    return made


def block(number: int) -> list[int]:
    """Return the tokens of a block of the trace."""
    rng = random.Random(number)
    return [rng.randrange(VOCABULARY) for _ in range(BLOCK_TOKENS)]


async def replay(router: str, requests: list[list[int]]) -> dict[str, Any]:
    """Serve the requests with two replicas; returns what the engines counted."""
    llm = AsyncLLM(
        "demo",
        parallel={"data": 2},
        router={"name": router},
        cache={"num_blocks": CACHE_BLOCKS, "block_size": BLOCK_TOKENS},
        observer={"names": ()},
    )
    async with llm:
        waiting = iter(requests)

        async def client() -> None:
            for tokens in waiting:
                async for _ in llm.generate(tokens, SamplingParams(max_tokens=8, ignore_eos=True), streams=False):
                    pass

        begin_s = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
        took_s = time.perf_counter() - begin_s
        totals = await llm.totals()
    return {
        "router": router,
        "hit_ratio": totals["num_prompt_tokens_cached"] / totals["num_prompt_tokens_admitted"],
        "prompt_tokens": totals["num_prompt_tokens_admitted"],
        "took_s": took_s,
    }


def main() -> None:
    """Replay in turns and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=290)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trace", type=Path, default=TRACE)
    options = parser.parse_args()
    requests = prompts(options.requests, options.trace)
    turns = [router for number in range(options.rounds) for router in ROUTERS[:: 1 if number % 2 else -1]]
    runs = [{**asyncio.run(replay(router, requests)), "load": os.getloadavg()[0]} for router in turns]
    ratios = {name: [run["hit_ratio"] for run in runs if run["router"] == name] for name in ROUTERS}
    summary = {name: {"median": statistics.median(found), "all": found} for name, found in ratios.items()}
    print(json.dumps({"requests": len(requests), "hit_ratio": summary, "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
