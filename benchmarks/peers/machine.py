"""What a reader must know of the machine. Linux only."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

__all__ = ["available_bytes", "cpu_ticks", "describe", "steal_ratio"]

TOLD_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_tile")
STEAL = 7  # of the numbers in the first line of /proc/stat


def describe() -> dict[str, Any]:
    """Return processor, instruction sets, cores, memory, system and load."""
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    facts = {name.strip(): value.strip() for name, _, value in lines}
    flags = facts.get("flags", "").split()
    return {
        "processor": facts.get("model name", platform.processor() or platform.machine()),
        "flags": [flag for flag in TOLD_FLAGS if flag in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": _meminfo("MemTotal"),
        "system": platform.platform(),
        "load": os.getloadavg()[0],
    }


def available_bytes() -> int:
    """Return the memory that can be had without swapping."""
    return _meminfo("MemAvailable")


def cpu_ticks() -> list[int]:
    """Return the clock ticks that all cores spent in each state since they started."""
    return [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]


def steal_ratio(before: list[int], after: list[int]) -> float:
    """Return the share of the time between that the host of a virtual machine took away; of all time that was wanted or idle."""
    spent = [late - early for early, late in zip(before, after, strict=True)]
    return spent[STEAL] / sum(spent) if sum(spent) else 0.0


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return 0
