"""CPU time of the engine itself: microseconds per running sequence and step, without a model.

    python benchmarks/micro/engine_overhead.py [--json]

Every sequence decodes; the fake backend's own time is measured and taken off. A copy with inlined strategies is measured in the same process,
interleaved: the same engine with its guarded strategies replaced by direct calls, to show what the hook seams cost. A second copy of
the plain engine gives the noise floor (A/A).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from trencadis.clock import SystemClock
from trencadis.interfaces import SchedulerView, TokenSplit
from trencadis.records import Batch, Bucket, Request, SamplingParams, StepOutput
from trencadis_plugins.eviction.lru import Lru
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend

BUDGET = 1 << 20


class TimedBackend(FakeBackend):
    """Knows how much CPU time it took itself."""

    spent_s = 0.0

    def _run(self, batch: Batch) -> StepOutput:
        start = time.process_time()
        output = super()._run(batch)
        self.spent_s += time.process_time() - start
        return output


def split(view: SchedulerView, *, token_budget: int) -> TokenSplit:
    """First come, first served written into the seam itself: no policy object, no check."""
    return TokenSplit(token_budget, token_budget)


def build(num_sequences: int, *, inlined: bool = False, num_blocks: int = 0) -> tuple[Any, TimedBackend]:
    backend = TimedBackend(strict=False, eos=-1, max_model_len=4096)
    engine = make_engine(
        backend=backend,
        eviction=Lru(),
        clock=SystemClock(),
        num_blocks=num_blocks + num_sequences * 256,
        block_size=16,
        max_num_seqs=num_sequences,
        max_num_batched_tokens=BUDGET,
    )
    if inlined:
        engine._scheduler._policy.split = split
        engine._batches.passes._bucketing.ask.bucket_for = Bucket.of  # every shape is its own bucket
    for i in range(num_sequences):
        prompt = tuple((i * 7 + j) % 97 for j in range(40))
        engine.add(
            Request(request_id=str(i), prompt_token_ids=prompt, params=SamplingParams(max_tokens=4000, temperature=0))
        )
    for _ in range(5):
        engine.step()
    return engine, backend


def measure(engine: Any, backend: TimedBackend, num_steps: int) -> float:
    """Return CPU seconds per step, the fake backend's own left out."""
    start, before = time.process_time(), backend.spent_s
    for _ in range(num_steps):
        engine.step()
    return (time.process_time() - start - (backend.spent_s - before)) / num_steps


def overhead(num_sequences: int, *, rounds: int, num_steps: int) -> dict[str, float]:
    engine, backend = build(num_sequences)
    per_step = statistics.median(measure(engine, backend, num_steps) for _ in range(rounds))
    return {
        "num_sequences": num_sequences,
        "us_per_step": round(per_step * 1e6, 2),
        "us_per_sequence_and_step": round(per_step * 1e6 / num_sequences, 3),
    }


def seams(num_sequences: int, *, rounds: int, num_steps: int) -> dict[str, float]:
    """Return the cost of the seams as a ratio, from interleaved pairs, and that of an identical pair."""
    plain, same, inlined = build(num_sequences), build(num_sequences), build(num_sequences, inlined=True)
    ratios, floor = [], []
    for _ in range(rounds):
        a, b, c = (measure(*one, num_steps) for one in (plain, inlined, same))
        ratios.append(a / b)
        floor.append(a / c)
    return {
        "num_sequences": num_sequences,
        "seams_ratio": round(statistics.median(ratios), 4),
        "aa_ratio": round(statistics.median(floor), 4),
        "aa_spread": round(statistics.pstdev(floor), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    sizes = {"rounds": args.rounds, "num_steps": args.steps}
    result = {
        "overhead": [overhead(n, **sizes) for n in (32, 64, 128, 256, 512, 1024)],
        "seams": seams(256, rounds=151, num_steps=30),
    }
    if args.json:
        print(json.dumps(result, indent=2))
        return
    for row in result["overhead"]:
        print(
            "{num_sequences:5} sequences  {us_per_step:8} us/step  {us_per_sequence_and_step:6} us/sequence".format(
                **row
            )
        )
    print("seams {seams_ratio} (A/A {aa_ratio} +- {aa_spread})".format(**result["seams"]))


if __name__ == "__main__":
    main()
