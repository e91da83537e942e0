"""What routing a request costs, and how often prompts of recorded traces find their prefix, by router.

    python benchmarks/micro/router.py [--json] [--rounds 15] [--skip-traces]

Costs: processor time of ``select`` with 1,000 replicas, beside what the client does for each request (hashing a prompt of 2,048 tokens,
looking its 128 blocks up). The contract allows 200 µs for ``select``. Each router is measured twice in turns (A/A): the ratio of the
two says what a difference is worth. The fastest round counts.

Hits: the routers alone, with replicas that are models: an LRU cache of blocks, prompts computed one after the other at a rate that
keeps replicas busy 70 % of the time without any cache, then 30 ms for each output token. Traces: Mooncake, FAST'25, Apache-2.0, from
``../shared/data/traces``; where they are not, this part says so and is left out. Blocks have 512 tokens, as in the traces.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from trencadis.engine.cache.hashing import BlockHasher
from trencadis.interfaces import ReplicaViews, Router, RoutingRequest
from trencadis_remote.replicas.prefix_index import PrefixIndex
from trencadis_remote.router.cache_aware import CacheAware
from trencadis_remote.router.config import CacheAwareConfig
from trencadis_remote.router.least_loaded import LeastLoaded
from trencadis_remote.router.power_of_two import PowerOfTwo
from trencadis_remote.router.prefix_affinity import PrefixAffinity
from trencadis_remote.router.round_robin import RoundRobin

TRACES = Path(__file__).parents[3] / "shared" / "data" / "traces"
NAMES = {
    "conversation": "mooncake_fast25_conversation_first30min.jsonl",
    "multi-turn": "mooncake_fast25_synthetic.jsonl",
}
CACHE_BLOCKS = 2048
"""Of each replica: a million tokens."""
BLOCK_TOKENS = 512
OUTPUT_S = 0.03
UTILISATION = 0.7
MAKERS: dict[str, Callable[[], Router]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "prefix_affinity": PrefixAffinity,
    "cache_aware": lambda: CacheAware(CacheAwareConfig(max_tree_tokens=200_000)),
}
NUM_REPLICAS = 1000


# ----------------------------------------------------------------------------------------------------------- costs


def some_requests(count: int) -> list[RoutingRequest]:
    """Return prompts of 2,048 tokens in families of 40 that share the first half."""
    rng, requests = random.Random(0), []
    for number in range(count):
        shared = random.Random(number // 40)
        tokens = [shared.randrange(32000) for _ in range(1024)] + [rng.randrange(32000) for _ in range(1024)]
        hashes = [
            (number // 40 if i < 64 else number * 1000).to_bytes(4, "little") + i.to_bytes(4, "little")
            for i in range(127)
        ]
        requests.append(RoutingRequest(token_ids=tuple(tokens), block_hashes=tuple(hashes)))
    return requests


def cost_us(call: Callable[[RoutingRequest], object], requests: list[RoutingRequest]) -> float:
    start_s = time.process_time()
    for request in requests:
        call(request)
    return (time.process_time() - start_s) / len(requests) * 1e6


def costs(rounds: int) -> list[dict[str, Any]]:
    requests, rng = some_requests(400), np.random.default_rng(0)
    hits = np.zeros(NUM_REPLICAS, np.int32)
    views = ReplicaViews(
        num_live=rng.integers(0, 30, NUM_REPLICAS, dtype=np.int32),
        num_waiting=rng.integers(0, 5, NUM_REPLICAS, dtype=np.int32),
        num_running=rng.integers(0, 25, NUM_REPLICAS, dtype=np.int32),
        kv_usage=rng.random(NUM_REPLICAS),
        hit_blocks=rng.integers(0, 60, NUM_REPLICAS, dtype=np.int32),
        is_healthy=rng.random(NUM_REPLICAS) < 0.98,
    )
    index, hasher = PrefixIndex(NUM_REPLICAS), BlockHasher(key="", compatibility="x", block_size=16)
    for number, request in enumerate(requests):
        for offset in range(1 + number % 40):  # the shared halves are on up to forty replicas
            index.update((number * 7 + offset) % NUM_REPLICAS, added=request.block_hashes[: 64 + offset], removed=())

    def hashed(request: RoutingRequest) -> None:
        hasher.extend([], np.array(request.token_ids, np.int32), num_blocks=127, salt="")

    def selects(make: Callable[[], Router]) -> Callable[[], Callable[[RoutingRequest], object]]:
        def fresh() -> Callable[[RoutingRequest], object]:
            router = make()
            return lambda request: router.select(request, views)

        return fresh

    calls = {name: selects(make) for name, make in MAKERS.items()}
    calls["(client) hash 2,048 tokens"] = lambda: hashed
    calls["(client) look up 127 blocks"] = lambda: lambda request: index.hits(request.block_hashes, hits)
    best = {name: [np.inf, np.inf] for name in calls}
    for _ in range(rounds):
        for name, make in calls.items():
            for side in (0, 1):
                best[name][side] = min(best[name][side], cost_us(make(), requests))
    return [
        {"call": name, "us": round(min(pair), 1), "a_over_a": round(pair[0] / pair[1], 3)}
        for name, pair in best.items()
    ]


# ------------------------------------------------------------------------------------------------------------ hits


class Fleet:
    """Replicas as models, and what a router is shown of them."""

    def __init__(self, count: int, router: Router, prefill_rate: float) -> None:
        self._router, self._rate = router, prefill_rate
        self._index = PrefixIndex(count)
        self._caches: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(count)]
        self._free_s = [0.0] * count
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._views = ReplicaViews(
            num_live=np.zeros(count, np.int32),
            num_waiting=np.zeros(count, np.int32),
            num_running=np.zeros(count, np.int32),
            kv_usage=np.zeros(count),
            hit_blocks=np.zeros(count, np.int32),
            is_healthy=np.ones(count, np.bool_),
        )
        self.num_hit_tokens = self.num_tokens = 0
        self.waits_s: list[float] = []

    def arrive(self, now_s: float, hash_ids: list[int], num_tokens: int, num_output: int) -> None:
        while self._events and self._events[0][0] <= now_s:
            heapq.heappop(self._events)[2]()
        hashes = tuple(one.to_bytes(8, "little") for one in hash_ids)
        request = RoutingRequest(token_ids=tuple(hash_ids), block_hashes=hashes)
        self._index.hits(hashes, self._views.hit_blocks)
        replica = int(self._router.select(request, self._views))
        self._index.expect(replica, hashes)
        self._views.num_live[replica] += 1
        self._views.num_waiting[replica] += 1
        start_s = max(now_s, self._free_s[replica])
        num_hit = self._computed(replica, hashes) * BLOCK_TOKENS  # in the order of arrival, as it is computed
        num_hit = min(num_hit, num_tokens - 1)
        end_s = self._free_s[replica] = start_s + (num_tokens - num_hit) / self._rate
        self.num_hit_tokens += num_hit
        self.num_tokens += num_tokens
        self.waits_s.append(end_s - now_s)

        def first_token() -> None:
            self._views.num_waiting[replica] -= 1
            self._views.num_running[replica] += 1

        def finished() -> None:
            self._views.num_running[replica] -= 1
            self._views.num_live[replica] -= 1
            self._index.forget(replica, hashes)
            self._router.on_finished(request, replica)

        for at_s, call in ((end_s, first_token), (end_s + num_output * OUTPUT_S, finished)):
            self._num_events += 1
            heapq.heappush(self._events, (at_s, self._num_events, call))

    def _computed(self, replica: int, hashes: tuple[bytes, ...]) -> int:
        """Return how many leading blocks a replica has, and give it all of them."""
        cache = self._caches[replica]
        num_hit = next((i for i, one in enumerate(hashes) if one not in cache), len(hashes))
        for one in reversed(hashes):  # the tail goes first
            cache[one] = None
            cache.move_to_end(one)
        removed = [cache.popitem(last=False)[0] for _ in range(len(cache) - CACHE_BLOCKS)]
        self._index.update(replica, added=hashes, removed=removed)
        return num_hit


def hits(name: str, count: int, router: str) -> dict[str, Any]:
    rows = [json.loads(line) for line in (TRACES / NAMES[name]).read_text().splitlines()]
    duration_s = (rows[-1]["timestamp"] - rows[0]["timestamp"]) / 1000
    rate = sum(row["input_length"] for row in rows) / duration_s / count / UTILISATION
    fleet = Fleet(count, MAKERS[router](), rate)
    for row in rows:
        fleet.arrive(row["timestamp"] / 1000, row["hash_ids"], row["input_length"], row["output_length"])
    return {
        "trace": name,
        "replicas": count,
        "router": router,
        "hit_percent": round(100 * fleet.num_hit_tokens / fleet.num_tokens, 1),
        "ttft_mean_s": round(float(np.mean(fleet.waits_s)), 2),
        "ttft_p99_s": round(float(np.quantile(fleet.waits_s, 0.99)), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--skip-traces", action="store_true")
    args = parser.parse_args()
    report: dict[str, Any] = {"costs": costs(args.rounds), "hits": []}
    missing = [file for file in NAMES.values() if not (TRACES / file).exists()]
    if not missing and not args.skip_traces:
        report["hits"] = [hits(name, count, router) for name in NAMES for count in (2, 8) for router in MAKERS]
    if args.json:
        print(json.dumps(report, indent=2))
        return
    for row in report["costs"]:
        print("{call:28} {us:7} us of CPU a request, {a_over_a} A/A".format(**row))
    for row in report["hits"]:
        print(
            "{trace:12} {replicas} replicas  {router:15} {hit_percent:5} % of prompt tokens found, "
            "first token after {ttft_mean_s} s, p99 {ttft_p99_s} s".format(**row)
        )
    if missing:
        print(f"Hits on traces are left out: there is no {missing[0]} in {TRACES}.")


if __name__ == "__main__":
    main()
