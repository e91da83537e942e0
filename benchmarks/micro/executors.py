"""What a rank in a process of its own costs: CPU and wall time of a decode step against a rank in the engine's process.

    python benchmarks/micro/executors.py [--json] [--batch-size 8] [--rounds 15] [--steps 40]

Two backends: one that computes nothing, whose step is what the executor itself takes; and a Llama of 110 million parameters. Engines
take turns, some steps each; a second engine with the executor ``inline`` gives the noise floor (A/A). CPU seconds are those of the
engine's process and of its ranks.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import socket
import statistics
import tempfile
import time
import timeit
from pathlib import Path
from typing import Any

import numpy as np
from idle_backend import Idle
from random_models import LLAMA_110M, save_random_model

from trencadis.clock import SystemClock
from trencadis.engine.build import build_engine
from trencadis.interfaces import Executor
from trencadis.link import Link
from trencadis.records import Batch, Bucket, ParallelLayout, Pass, Phase, Request, SamplingParams, TableWrites
from trencadis.registry import load_with_plugins
from trencadis_plugins.executor.config import ProcessesConfig
from trencadis_plugins.executor.inline import InlineExecutor
from trencadis_plugins.executor.processes import ProcessesExecutor
from trencadis_plugins.executor.ranks.link import Kind, receive_messages, send_message
from trencadis_plugins.executor.ranks.wire import decode_batch, encode_batch
from trencadis_testing.engines import make_engine

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def without_model(name: str, batch_size: int) -> tuple[Any, Executor]:
    """Return an engine whose backend computes nothing."""
    executor: Executor = (
        InlineExecutor() if name == "inline" else ProcessesExecutor(ProcessesConfig(), layout=ParallelLayout())
    )
    engine = make_engine(
        executor=executor,
        backend=Idle(),
        clock=SystemClock(),
        num_blocks=batch_size * 512,
        block_size=16,
        max_num_seqs=batch_size,
        max_num_batched_tokens=1 << 16,
    )
    return engine, executor


def with_model(name: str, batch_size: int, model: Path) -> tuple[Any, Executor]:
    """Return an engine with a model."""
    tables = {
        "model": {"path": str(model), "max_model_len": 4096},
        "executor": {"name": name},
        "backend": {"name": "torch", "torch": {"device": "cpu", "num_threads": 1}},
        "cache": {"num_blocks": batch_size * 256},
        "engine": {"max_num_seqs": batch_size},
        "observer": {"names": []},
    }
    resolved, registry = load_with_plugins(environ={}, overrides=tables)
    engine = build_engine(resolved.config, registry=registry)
    return engine, engine._executor


def fill(engine: Any, batch_size: int) -> None:
    """Have as many sequences decode."""
    for number in range(batch_size):
        prompt = tuple((number * 7 + j) % 90 for j in range(32))
        params = SamplingParams(max_tokens=3900, temperature=0, ignore_eos=True)
        engine.add(Request(request_id=str(number), prompt_token_ids=prompt, params=params))
    for _ in range(5):
        engine.step()


def cpu_s(executor: Executor) -> float:
    """Return the CPU seconds of this process and of an executor's ranks."""
    spent = time.process_time()
    for rank in getattr(executor, "_ranks", ()):
        fields = Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()
        spent += (int(fields[11]) + int(fields[12])) * _TICK_S
    return spent


def measure(engine: Any, executor: Executor, num_steps: int) -> tuple[float, float]:
    """Return CPU and wall seconds per step."""
    cpu, wall = cpu_s(executor), time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    return (cpu_s(executor) - cpu) / num_steps, (time.perf_counter() - wall) / num_steps


def compare(engines: dict[str, tuple[Any, Executor]], *, rounds: int, num_steps: int) -> dict[str, Any]:
    """Return ratios of ``processes`` and of a second ``inline`` over ``inline``, and the wall time added to a step."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, one in engines.items():
            taken[name].append(measure(*one, num_steps))
    found: dict[str, Any] = {}
    plain = taken["inline"]
    for name in ("processes", "inline again"):
        ratios = [other[0] / own[0] for own, other in zip(plain, taken[name], strict=True)]
        added = [other[1] - own[1] for own, other in zip(plain, taken[name], strict=True)]
        found[name] = {
            "cpu_ratio": round(statistics.median(ratios), 4),
            "cpu_ratio_spread": round(statistics.pstdev(ratios), 4),
            "added_us": round(statistics.median(added) * 1e6, 1),
            "fastest_added_us": round((min(one[1] for one in taken[name]) - min(one[1] for one in plain)) * 1e6, 1),
        }
    found["inline_us_per_step"] = round(min(one[1] for one in plain) * 1e6, 1)
    for engine, _ in engines.values():
        engine.close()
    return found


def wire() -> dict[str, float]:
    """Return what a decode step of 8 and of 32 sequences takes between engine and rank: bytes, and the fastest microseconds of many."""
    found: dict[str, float] = {}
    for count in (8, 32):
        some, none = np.arange(count, dtype=np.int32), np.empty(0, np.int32)
        one = Pass(
            bucket=Bucket(count, 1, 8 * count, Phase.DECODE),
            indices=some,
            rows=some,
            starts=some,
            query_lens=some,
            num_logits=some,
            num_prompt_logits=some,
        )
        writes = TableWrites(rows=none, columns=none, block_ids=none)
        batch = Batch(step=5, num_sequences=count, row_starts=(), table_writes=writes, passes=(one,))
        data = encode_batch(batch)
        near, far = map(Link, socket.socketpair())

        def exchange(near: Link = near, far: Link = far, data: bytes = data) -> None:
            send_message(near, Kind.BATCH, 1, data)
            receive_messages(far)

        calls = {
            "encode": functools.partial(encode_batch, batch),
            "decode": functools.partial(decode_batch, data),
            "send_and_receive": exchange,
        }
        found[f"bytes_{count}"] = len(data)
        for name, call in calls.items():
            found[f"{name}_us_{count}"] = round(min(timeit.repeat(call, number=5000, repeat=7)) / 5000 * 1e6, 1)
        near.close()
        far.close()
    return found


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    names = {"inline": "inline", "processes": "processes", "inline again": "inline"}
    result = {"num_cores": os.cpu_count(), "wire": wire()}
    with tempfile.TemporaryDirectory() as folder:
        model = save_random_model(LLAMA_110M, Path(folder))
        kinds = {
            "no model": lambda name: without_model(name, args.batch_size),
            "llama 110M": lambda name: with_model(name, args.batch_size, model),
        }
        for kind, make in kinds.items():
            engines = {label: make(name) for label, name in names.items()}
            for engine, _ in engines.values():
                fill(engine, args.batch_size)
            result[kind] = compare(engines, rounds=args.rounds, num_steps=args.steps)
    if args.json:
        print(json.dumps(result, indent=2))
        return
    for kind in ("wire", *kinds):
        print(kind, json.dumps(result[kind]))


if __name__ == "__main__":
    main()
