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
from trencadis.records import Request, SamplingParams


def pairs(num_sequences: int, *, rounds: int, num_steps: int) -> dict[str, float]:
    """Return what the notes of a step cost, and the noise of the measurement."""
    differences, floor, steps = [], [], []
    engine, backend = build(num_sequences)
    recorder = engine._recorder
    for number in range(rounds):
        if number % 30 == 29:  # texts have an end
            engine, backend = build(num_sequences)
            recorder = engine._recorder
        before = measure(engine, backend, num_steps)
        engine._recorder = None
        without = measure(engine, backend, num_steps)
        engine._recorder = recorder
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
            engine._recorder = None
        gc.collect()
        tracemalloc.start()
        for _ in range(num_steps):
            engine.step()
        gc.collect()
        grown.append(tracemalloc.get_traced_memory()[0] / num_steps)
        tracemalloc.stop()
    return {"num_sequences": num_sequences, "bytes_per_step": round(grown[0] - grown[1])}


def frame(num_blocks: int) -> dict[str, float]:
    """Return what a key frame costs with a full prefix cache, at 256 running sequences."""
    engine, _ = build(256)
    blocks = engine._state.blocks
    chain = [number.to_bytes(32, "little") for number in range(num_blocks)]
    kept = blocks.allocate(num_blocks)
    blocks.register_chain(kept.tolist(), chain, start=0, salt="", now_s=0.0)
    blocks.release(kept, now_s=0.0)
    recorder = engine.flight_recorder
    lives = list(recorder._live.values())
    spent = []
    for _ in range(9):
        start = time.process_time()
        recorder.take_frame(lives)
        spent.append(time.process_time() - start)
    gc.collect()
    tracemalloc.start()
    kept_frame = recorder.take_frame(lives)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del kept_frame
    return {"num_blocks": num_blocks, "ms": round(1e3 * statistics.median(spent), 2), "bytes": size}


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
        "frames": [frame(n) for n in (4_000, 40_000)],
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
