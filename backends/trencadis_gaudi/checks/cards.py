"""Facts about several devices. Run as a program, this module is the process of one device."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

from trencadis.errors import BackendError
from trencadis_gaudi.checks.bench import Bench
from trencadis_gaudi.checks.records import Found

__all__ = ["main", "ranks", "sum_over", "sums"]


def sums(bench: Bench) -> Found:
    """Sum over all devices."""
    try:
        count = bench.habana.hpu.device_count()
    except BackendError as error:
        return Found(None, f"not tested: {error}")
    if count < 2:
        return Found(None, "one device: not tested")
    return sum_over(count, backend="hccl", device="hpu")


def ranks(bench: Bench) -> Found:
    """Serve with two ranks, each with a device of its own."""
    if bench.config.device == "hpu":
        try:
            count = bench.habana.hpu.device_count()
        except BackendError as error:
            return Found(None, f"not tested: {error}")
        if count < 2:
            return Found(None, "one device: not tested")
    from trencadis_gaudi.checks.engine import ranks_serve  # imported here, since the sums need no engine

    return ranks_serve(bench)


def sum_over(count: int, *, backend: str, device: str) -> Found:
    """Start a process for each device, and compare their sums with the number of devices.

    Args:
        count: Number of devices.
        backend: Backend of ``torch.distributed``.
        device: Device type of the summed tensors.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-P", "-m", __name__, backend, device]
    every = [
        # Read when torch is imported. Source: gaudi-pytorch-bridge 1.19.0, torch/distributed/hccl/__init__.py.
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for rank in range(count)
    ]
    processes = [
        subprocess.Popen(command, env={**os.environ, **one}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for one in every
    ]
    answers = [process.communicate() for process in processes]
    found = [out.split()[-1] if out.split() else "nothing" for out, _ in answers]
    errors = [error.strip().splitlines()[-1] for _, error in answers if error.strip()]
    is_right = all(answer == f"{count}.0" for answer in found)
    text = f"{count} devices sum to {', '.join(found)}"
    return Found(is_right, text if is_right or not errors else f"{text}: {errors[0]}")


def main(argv: Sequence[str]) -> None:
    """Print the sum that this rank receives."""
    import torch

    _, backend, device = argv
    if backend == "hccl":
        importlib.import_module("habana_frameworks.torch.distributed.hccl")
    torch.distributed.init_process_group(
        backend, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    one = torch.ones(1).to(device)
    torch.distributed.all_reduce(one)
    print(one.item(), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv)
