"""What a result was measured on, and what that machine can do at most: both belong into every file of results."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Any

import torch


def describe() -> dict[str, Any]:
    """Return processor, the instruction sets that decide here, and versions."""
    found: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    flags = set(found.get("flags", "").split())
    return {
        "processor": found.get("model name", platform.machine()),
        "cores": torch.get_num_threads(),
        "flags": sorted(flags & {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8"}),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def ceilings(rounds: int = 5) -> dict[str, float]:
    """Return the best rates seen: reads of a large array, GB/s, and products of large float32 matrices, GFLOP/s.

    By CPU time, so for one thread: that of all threads together is more than what passes on the clock.
    """
    array = torch.randn(64_000_000)
    best = max(_rate(array.sum, array.numel() * 4) for _ in range(rounds))
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    packed = torch.ops.mkldnn._reorder_linear_weight(right, 1024)
    plain = max(_rate(lambda: left @ right, 2 * 1024**3) for _ in range(rounds))
    blocked = max(
        _rate(lambda: torch.ops.mkldnn._linear_pointwise(left, packed, None, "none", [], ""), 2 * 1024**3)
        for _ in range(rounds)
    )
    return {"read_gb_per_s": round(best, 1), "float32_gflop_per_s": round(max(plain, blocked), 1)}


def _rate(run: Any, amount: float) -> float:
    start_s = time.process_time()
    run()
    return amount / (time.process_time() - start_s) / 1e9
