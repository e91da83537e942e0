"""Collectives of two rank processes: memory that both map against gloo, of ``torch.distributed``.

    python benchmarks/micro/collectives.py --rounds 41 > collectives.json

Each round has all variants in turn, a batch of calls of each; ``shared_again`` is the same as ``shared``: the ratio of these two is the
noise floor. 64 KiB is what eight rows of a model of hidden size 2048 sum in a decode step, twice a layer, in float32. Times are those
of rank 0, from one call to the next; CPU seconds those of both processes. On a machine that is busy otherwise the fast end counts:
``us_fast`` is the tenth percentile of batches.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from trencadis.interfaces import Collective
from trencadis_plugins.executor.collectives.groups import create_group, open_group
from trencadis_plugins.executor.collectives.owner import GroupAddress

SIZES = (4096, 65536, 1048576)
CALLS = {4096: 100, 65536: 50, 1048576: 10}
"""Of a batch."""
VARIANTS = ("shared", "gloo", "shared_again")


def cases() -> dict[str, tuple[int, Callable[[Collective, torch.Tensor], object], int]]:
    """Return name: bytes, call, calls of a batch."""
    return {
        **{f"all_reduce {size}": (size, _sum, CALLS[size]) for size in SIZES},
        "all_gather 65536": (65536, lambda group, tensor: group.all_gather(tensor), CALLS[65536]),
        "broadcast 32": (32, lambda group, tensor: group.broadcast(tensor), CALLS[4096]),
    }


def _sum(group: Collective, tensor: torch.Tensor) -> None:
    group.all_reduce(tensor)


def run(addresses: dict[str, GroupAddress], rounds: int, pipe: Connection) -> None:
    """Make a rank's calls, and send seconds and CPU seconds per call of each batch."""
    torch.set_num_threads(1)
    groups = {name: open_group(address) for name, address in addresses.items()}
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for case, (size, call, number) in cases().items():
        tensor = torch.zeros(size // 4)
        times = found[case] = {name: [] for name in VARIANTS}
        for turn in range(rounds + 2):
            first = turn % len(VARIANTS)  # else each one always finds the same one's data in the caches
            for name in VARIANTS[first:] + VARIANTS[:first]:
                group = groups[name.partition("_")[0]]
                groups["shared"].barrier()
                start_s, start_cpu_s = time.perf_counter(), time.process_time()
                for _ in range(number):
                    call(group, tensor)
                took = (time.perf_counter() - start_s) / number, (time.process_time() - start_cpu_s) / number
                if turn >= 2:  # the first ones warm up
                    times[name].append(took)
    pipe.send(found)
    groups["shared"].barrier()
    for group in groups.values():
        group.close()


def measure(rounds: int) -> dict[str, Any]:
    """Return the figures of each case."""
    context = multiprocessing.get_context("spawn")
    owners = {"shared": create_group("shared_memory", size=2), "gloo": create_group("gloo", size=2)}
    pipes, processes = [], []
    for rank in range(2):
        here, there = context.Pipe()
        addresses = {name: owner.address(rank) for name, owner in owners.items()}
        processes.append(context.Process(target=run, args=(addresses, rounds, there)))
        pipes.append(here)
    for process in processes:
        process.start()
    try:
        ranks = [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.join()
        for owner in owners.values():
            owner.unlink()
    return {case: figures([rank[case] for rank in ranks]) for case in cases()}


def figures(ranks: list[dict[str, list[tuple[float, float]]]]) -> dict[str, Any]:
    """Return microseconds, CPU microseconds and paired ratios of one case."""
    seconds = {name: [took for took, _ in ranks[0][name]] for name in VARIANTS}
    cpu = {name: [a[1] + b[1] for a, b in zip(ranks[0][name], ranks[1][name], strict=True)] for name in VARIANTS}

    def ratio(of: dict[str, list[float]], above: str) -> list[float]:
        pairs = [a / b for a, b in zip(of[above], of["shared"], strict=True)]
        return [round(one, 3) for one in statistics.quantiles(pairs, n=4)]

    return {
        "us_median": {name: round(statistics.median(of) * 1e6, 1) for name, of in seconds.items()},
        "us_fast": {name: round(statistics.quantiles(of, n=10)[0] * 1e6, 1) for name, of in seconds.items()},
        "cpu_us_median": {name: round(statistics.median(of) * 1e6, 1) for name, of in cpu.items()},
        "gloo_to_shared_quartiles": ratio(seconds, "gloo"),
        "again_to_shared_quartiles": ratio(seconds, "shared_again"),
        "cpu_gloo_to_shared_quartiles": ratio(cpu, "gloo"),
        "cpu_again_to_shared_quartiles": ratio(cpu, "shared_again"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=41)
    given = parser.parse_args()
    print(
        json.dumps(
            {
                "machine": platform.platform(),
                "cores": multiprocessing.cpu_count(),
                "torch": torch.__version__,
                "rounds": given.rounds,
                "cases": measure(given.rounds),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
