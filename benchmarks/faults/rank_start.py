"""Times the start and the restart of two ranks of the demo model, forked from a template process and in fresh interpreters.

    python benchmarks/faults/rank_start.py [--rounds 7] > benchmarks/results/rank_start.json

Pairs take turns, in changing order. Times are wall times, for that is what requests in flight wait for: from the loss of the ranks until
they have loaded and have their cache, and from nothing until `LLM` is ready, torch imported in this process or not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

from trencadis import LLM
from trencadis_plugins.executor import processes

SIDES = ("forked", "afresh")


def times(side: str) -> dict[str, float]:
    """Return seconds until an engine is ready, and until its ranks are back after each of three losses."""
    processes.CAN_FORK = side == "forked"
    begin_s = time.perf_counter()
    config: dict[str, Any] = {
        "executor.name": "processes",
        "parallel.tensor": 2,
        "observer.names": [],
        "cache.num_blocks": 128,
    }
    with LLM(**config) as llm:
        start_s = time.perf_counter() - begin_s
        executor: Any = llm._frontend.engine.engine._executor  # type: ignore[attr-defined]
        back_s = []
        for _ in range(3):
            executor._restarts.clear()
            executor._lose("a measurement")
            begin_s = time.perf_counter()
            executor.restart()
            back_s.append(time.perf_counter() - begin_s)
    return {"start_s": start_s, "back_s": statistics.median(back_s)}


def main() -> None:
    """Measure in turns and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rounds = []
    for number in range(options.rounds):
        found = {side: times(side) for side in SIDES[:: 1 if number % 2 else -1]}
        rounds.append({**found, "load": os.getloadavg()[0]})
    summary: dict[str, Any] = {
        key: {
            **{side: statistics.median(one[side][key] for one in rounds) for side in SIDES},
            "ratio": statistics.median(one["forked"][key] / one["afresh"][key] for one in rounds),
        }
        for key in ("start_s", "back_s")
    }
    print(json.dumps({"summary": summary, "rounds": rounds}, indent=1))


if __name__ == "__main__":
    main()
