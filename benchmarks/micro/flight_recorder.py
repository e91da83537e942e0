"""What the flight recorder costs a step: microseconds with it and without, from interleaved pairs in one process; memory; key frames.

    python benchmarks/micro/flight_recorder.py [--json]

"Without" is the same engine with the recorder taken away for some steps, between steps with it; those before against those after
give the noise floor (A/A). A step's own time is given twice: of the engine on a fake backend, whose time is left out, and of the demo
model on the torch backend, which is the smallest step that anybody serves.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
import tracemalloc
from typing import Any

from engine_overhead import build, measure

from trencadis.api import build_engine, load_with_plugins
from trencadis.engine.stage import Stages
from trencadis.records import Request, SamplingParams


def take_away(engine: Any) -> None:
    """Take the recorder out of an engine."""
    engine._stages = Stages([stage for stage in engine._stages.all if stage.name != "flight_recorder"])


def without_recorder(engine: Any, backend: Any, num_steps: int) -> float:
    """Return CPU seconds per step of an engine whose recorder is away, its trailing blocks too; they begin anew afterwards."""
    stages, recorder = engine._stages, engine.stage("flight_recorder")
    take_away(engine)
    for part in engine._state.blocks.parts:
        part.journal = None
    spent_s = measure(engine, backend, num_steps)
    engine._stages = stages
    recorder.follow()
    recorder._trail.target = 2**62  # as in mid-run: what a step changes is changed again
    return spent_s


def pairs(num_sequences: int, *, rounds: int, num_steps: int) -> dict[str, float]:
    """Return what the notes of a step and the trailing blocks cost, and the noise of the measurement."""
    differences, floor, steps = [], [], []
    engine, backend = build(num_sequences)
    without_recorder(engine, backend, num_steps)
    for number in range(rounds):
        if number % 30 == 29:  # texts have an end
            engine, backend = build(num_sequences)
            without_recorder(engine, backend, num_steps)
        before = measure(engine, backend, num_steps)
        without = without_recorder(engine, backend, num_steps)
        after = measure(engine, backend, num_steps)
        differences.append((before + after) / 2 - without)
        floor.append(after - before)
        steps.append(without)
    return {
        "num_sequences": num_sequences,
        "us_per_step_without": round(1e6 * statistics.median(steps), 2),
        "us_per_step_added": round(1e6 * statistics.median(differences), 3),
        "us_aa": round(1e6 * statistics.median(floor), 3),
        "us_standard_error": round(1.25e6 * statistics.pstdev(differences) / rounds**0.5, 3),
    }


def memory(num_sequences: int, *, num_steps: int = 800) -> dict[str, float]:
    """Return what the record of a step takes, bytes: two runs, of which one has no recorder."""
    grown = []
    for records in (True, False):
        engine, _ = build(num_sequences)
        if not records:
            take_away(engine)
        gc.collect()
        tracemalloc.start()
        for _ in range(num_steps):
            engine.step()
        gc.collect()
        grown.append(tracemalloc.get_traced_memory()[0] / num_steps)
        tracemalloc.stop()
    return {"num_sequences": num_sequences, "bytes_per_step": round(grown[0] - grown[1])}


def frame(num_blocks: int) -> dict[str, float]:
    """Return what a key frame costs with a full prefix cache, at 256 running sequences, and what the trailing blocks hold for it."""
    engine, _ = build(256, num_blocks=num_blocks)
    recorder, blocks = engine.stage("flight_recorder"), engine._state.blocks
    for part in blocks.parts:
        part.journal = None
    for first in range(0, num_blocks, 1000):
        chain = [number.to_bytes(32, "little") for number in range(first, min(first + 1000, num_blocks))]
        kept = blocks.allocate(len(chain))
        blocks.register_chain(kept.tolist(), chain, start=0, salt="", now_s=0.0)
        blocks.release(kept, now_s=0.0)
    gc.collect()
    tracemalloc.start()
    recorder.follow()
    trailing = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    spent = []
    for _ in range(9):
        start = time.process_time()
        recorder._new_segment(engine._scheduler.next_step)
        spent.append(time.process_time() - start)
    tracemalloc.start()
    recorder._new_segment(engine._scheduler.next_step)
    size = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    start = time.process_time()
    recorder.record(reason="request")
    record_s = time.process_time() - start
    return {
        "num_blocks": num_blocks,
        "ms": round(1e3 * statistics.median(spent), 2),
        "bytes": size,
        "trailing_bytes": trailing,
        "record_ms": round(1e3 * record_s),
    }


def model_step(num_sequences: int) -> dict[str, float]:
    """Return CPU microseconds of a decode step of the demo model."""
    resolved, registry = load_with_plugins(
        environ={}, overrides={"model.path": "demo", "engine.max_num_seqs": num_sequences, "observer.names": []}
    )
    engine: Any = build_engine(resolved.config, registry=registry)
    for number in range(num_sequences):
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        engine.add(Request(request_id=str(number), prompt_token_ids=tuple(range(5, 30)), params=params))
    for _ in range(10):
        engine.step()
    start = time.process_time()
    for _ in range(60):
        engine.step()
    spent = (time.process_time() - start) / 60
    engine.close()
    return {"num_sequences": num_sequences, "us_per_step": round(1e6 * spent, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=241)
    parser.add_argument("--steps", type=int, default=25)
    args = parser.parse_args()
    result = {
        "load_average": os.getloadavg()[0],
        "pairs": [pairs(n, rounds=args.rounds, num_steps=args.steps) for n in (32, 256)],
        "memory": [memory(n) for n in (1, 32, 256)],
        "frames": [frame(n) for n in (4_000, 100_000, 1_000_000)],
        "demo_model": model_step(32),
    }
    if args.json:
        print(json.dumps(result, indent=2))
        return
    for name, rows in result.items():
        for row in rows if isinstance(rows, list) else [rows]:
            print(f"{name}: {row}")


if __name__ == "__main__":
    main()
