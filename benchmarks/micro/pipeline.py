"""Measures the idle share of a pipeline's stages, in an exact model and with ranks on this machine.

    python benchmarks/micro/pipeline.py [--json] [--stages 2] [--rounds 7] [--steps 60]

The exact model is the engine with stages whose time is 8 ms for a batch and 0.02, 0.1 or 1 ms for each of its tokens, and more requests
than fit: there are 64 rows, or blocks for 16,000 tokens, and one that ends makes room for the next. Its figures depend on no machine.

Live, a Llama of 12 layers runs in as many ranks as there are stages, a thread each. A stage's answers tell when it was through with a
batch; it began when it was through with the one before and the stage before was through with this one. Engines with one batch for each stage (twice:
A/A) and with one at a time take turns. On a machine with fewer free cores than ranks and an engine need, stages wait for cores, which
counts as computing, and are late for each other, which does not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from random_models import LLAMA_110M, save_random_model

from trencadis.clock import SimulatedClock
from trencadis.engine.build import build_engine
from trencadis.records import Batch, Request, SamplingParams
from trencadis.registry import load_with_plugins
from trencadis_plugins.executor.ranks.link import Kind
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend
from trencadis_testing.staged_executor import StagedExecutor, num_tokens_of


def requests(seed: int) -> Any:
    """Yield requests for ever: prompts of 20 to 400 tokens, and 20 to 80 tokens after them."""
    draw = random.Random(seed)
    for number in itertools.count():
        prompt = tuple(draw.randrange(1, 97) for _ in range(draw.randint(20, 400)))
        params = SamplingParams(max_tokens=draw.randint(20, 80), temperature=0, ignore_eos=True)
        yield Request(request_id=f"{seed}-{number}", prompt_token_ids=prompt, params=params)


def exact(num_stages: int, token_s: float, *, max_num_seqs: int = 64, num_blocks: int = 40_000, num: int = 128) -> Any:
    """Return the bubble while requests wait, of exact stages."""
    clock = SimulatedClock()
    stages = StagedExecutor(
        clock=clock,
        num_stages=num_stages,
        seconds=lambda batch: 0.008 + token_s * num_tokens_of(batch),
        make_backend=lambda: FakeBackend(eos=-1, max_model_len=512, strict=False),
    )
    engine = make_engine(
        executor=stages, clock=clock, pipeline=num_stages, max_num_seqs=max_num_seqs, num_blocks=num_blocks
    )
    for request in itertools.islice(requests(0), num):
        engine.add(request)
    while engine.num_waiting:
        engine.step()
    found = round(stages.bubble(), 4)
    engine.close()
    return found


class Watch:
    """Notes when each stage was through with each batch.

    Args:
        executor: Of an engine; its first rank of each stage is looked at.
        num_stages: How many.
    """

    def __init__(self, executor: Any, num_stages: int) -> None:
        self.sent_s: dict[int, float] = {}
        self.ended_s: list[dict[int, float]] = [{} for _ in range(num_stages)]
        take, submit = executor._take, executor.submit
        per_stage = executor.num_ranks // num_stages

        def noting(rank: int, kind: Kind, number: int, payload: bytes) -> None:
            if kind is Kind.OUTPUT and number in self.sent_s and rank % per_stage == 0:
                self.ended_s[rank // per_stage][number] = time.perf_counter()
            take(rank, kind, number, payload)

        def sending(batch: Batch) -> Any:
            step = submit(batch)
            if batch.passes:
                self.sent_s[step.answers.number] = time.perf_counter()
            return step

        executor._take, executor.submit = noting, sending

    def bubble(self) -> float:
        """Return the share of time in which stages had nothing to compute, since the second batch; forgets all."""
        idle_s = all_s = 0.0
        numbers = sorted(self.sent_s)
        ready = self.sent_s
        for ended in self.ended_s:
            for before, number in itertools.pairwise(numbers):
                idle_s += max(0.0, ready[number] - ended[before])
            all_s += ended[numbers[-1]] - ended[numbers[0]]
            ready = ended
        self.sent_s, self.ended_s = {}, [{} for _ in self.ended_s]
        return idle_s / all_s


class Live:
    """An engine over ranks that always has requests.

    Args:
        model: Directory.
        num_stages: Ranks.
        overlaps: One batch for each stage in flight, or one.
        seed: Of the requests.
    """

    def __init__(self, model: Path, num_stages: int, *, overlaps: bool, seed: int) -> None:
        tables = {
            "model": {"path": str(model), "max_model_len": 512},
            "executor": {"name": "processes"},
            "parallel": {"pipeline": num_stages},
            "backend": {"name": "torch", "torch": {"device": "cpu", "num_threads": 1}},
            "cache": {"num_blocks": 1024},
            "engine": {"max_num_seqs": 16 * num_stages, "async_scheduling": overlaps},
            "observer": {"names": []},
        }
        resolved, registry = load_with_plugins(environ={}, overrides=tables)
        self.engine: Any = build_engine(resolved.config, registry=registry)
        self._requests = requests(seed)
        self._watch = Watch(self.engine._executor, num_stages)
        self.turn(30)

    def turn(self, num_steps: int) -> tuple[float, float]:
        """Take some steps, and let those in flight end; returns the bubble, and tokens per second."""
        engine, num_tokens, since_s = self.engine, 0, time.perf_counter()
        engine.is_paused = False
        for _ in range(num_steps):
            while engine.num_waiting < 8:
                engine.add(next(self._requests))
            num_tokens += len(engine.step().token_ids)
        engine.is_paused = True
        while engine.inspect().steps_in_flight:
            num_tokens += len(engine.step().token_ids)
        return self._watch.bubble(), num_tokens / (time.perf_counter() - since_s)


def live(num_stages: int, *, rounds: int, num_steps: int) -> dict[str, Any]:
    """Return bubbles of engines that take turns, and their speed against that of one batch at a time."""
    with tempfile.TemporaryDirectory() as folder:
        model = save_random_model({**LLAMA_110M, "vocab_size": 4096}, Path(folder))
        engines = {
            "a batch for each stage": Live(model, num_stages, overlaps=True, seed=1),
            "the same again": Live(model, num_stages, overlaps=True, seed=1),
            "one batch at a time": Live(model, num_stages, overlaps=False, seed=1),
        }
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
        for _ in range(rounds):
            for name, one in engines.items():
                taken[name].append(one.turn(num_steps))
        for one in engines.values():
            one.engine.close()
    plain = taken["one batch at a time"]
    found: dict[str, Any] = {}
    for name, turns in taken.items():
        bubbles, speeds = zip(*turns, strict=True)
        found[name] = {
            "bubble": round(statistics.median(bubbles), 3),
            "bubble_spread": round(statistics.pstdev(bubbles), 3),
            "least_bubble": round(min(bubbles), 3),
            "speed_ratio": round(
                statistics.median(own / other[1] for own, other in zip(speeds, plain, strict=True)), 3
            ),
        }
    return found


def main() -> None:
    """Print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    limits: dict[str, dict[str, int]] = {
        "64 sequences": {},
        "16,000 tokens": {"max_num_seqs": 256, "num_blocks": 4_000},
    }
    result: dict[str, Any] = {
        "exact": {
            f"{num_stages} stages, {token_ms} ms a token, {limit}": exact(num_stages, token_ms / 1000, **sizes)
            for num_stages in (2, 4, 8)
            for token_ms in (0.02, 0.1, 1.0)
            for limit, sizes in limits.items()
        }
    }
    before = os.getloadavg()[0]
    result["live"] = live(args.stages, rounds=args.rounds, num_steps=args.steps)
    result |= {"num_cores": os.cpu_count(), "load": [round(before, 1), round(os.getloadavg()[0], 1)]}
    if args.json:
        print(json.dumps(result, indent=2))
        return
    for part in ("exact", "live"):
        for name, figures in result[part].items():
            print(f"{part}: {name}: {json.dumps(figures)}")
    print(f"{result['num_cores']} cores, load {result['load']}")


if __name__ == "__main__":
    main()
