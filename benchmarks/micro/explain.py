"""What the step record costs a step: microseconds with it and without, from interleaved pairs in one process.

    python benchmarks/micro/explain.py [--json]

"Without" is the same engine with the record switched off for some steps, between steps with it; those before against those after
give the noise floor (A/A). The time of a step includes the fake backend's, as a user of it would see it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from trencadis.clock import SystemClock
from trencadis.engine.stage import Stages
from trencadis.records import Request, SamplingParams
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend


class Subject:
    """One engine whose record can be switched off and on."""

    def __init__(self, num_sequences: int) -> None:
        self.engine: Any = make_engine(
            backend=FakeBackend(strict=False, eos=-1, max_model_len=8192),
            clock=SystemClock(),
            num_blocks=num_sequences * 512,
            block_size=16,
            max_num_seqs=num_sequences,
            max_num_batched_tokens=1 << 20,
            explain_steps=1000,
        )
        self._on, self._off = self.engine._stages, Stages()
        params = SamplingParams(max_tokens=8000, temperature=0)
        for i in range(num_sequences):
            prompt = tuple((i * 7 + j) % 97 for j in range(40))
            self.engine.add(Request(request_id=str(i), prompt_token_ids=prompt, params=params))
        self.measure(20, explains=True)

    def measure(self, num_steps: int, *, explains: bool) -> float:
        """Return CPU seconds per step."""
        self.engine._stages = self._on if explains else self._off
        step = self.engine.step
        start = time.process_time()
        for _ in range(num_steps):
            step()
        return (time.process_time() - start) / num_steps


def cost(num_sequences: int, *, rounds: int, num_steps: int) -> dict[str, float]:
    subject = Subject(num_sequences)
    differences, floor, plain = [], [], []
    for _ in range(rounds):
        a, b, c = (subject.measure(num_steps, explains=explains) for explains in (True, False, True))
        differences.append((a + c) / 2 - b)
        floor.append(a - c)
        plain.append(b)
    per_step = statistics.median(plain)
    return {
        "num_sequences": num_sequences,
        "us_per_step": round(per_step * 1e6, 2),
        "record_us": round(statistics.median(differences) * 1e6, 2),
        "record_percent": round(100 * statistics.median(differences) / per_step, 2),
        "aa_us": round(statistics.median(floor) * 1e6, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=81)
    parser.add_argument("--steps", type=int, default=25)
    args = parser.parse_args()
    rows = [cost(n, rounds=args.rounds, num_steps=args.steps) for n in (1, 32, 256)]
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(
            "{num_sequences:5} sequences  {us_per_step:8} us/step  record {record_us:5} us = {record_percent} % (A/A {aa_us} us)".format(
                **row
            )
        )


if __name__ == "__main__":
    main()
