"""Facts about the vendor's metrics, which other checks rely on."""

from __future__ import annotations

import torch

from trencadis_gaudi.checks.bench import Bench, on_device
from trencadis_gaudi.checks.records import Found

__all__ = ["compilations", "fallbacks"]


@on_device
def compilations(bench: Bench) -> Found:
    """Run a new shape twice."""
    given = bench.to_device(torch.ones(17, 193))
    counts = []
    for _ in range(2):
        with bench.compilations() as compiled:
            _ = given * 3 + 1  # kept, since lazy mode does not compute dropped results
        counts.append(compiled.number)
    bench.counts = bool(counts[0])
    first_is_right = counts[0] == 1 if bench.habana.is_lazy else counts[0] > 0
    return Found(first_is_right and not counts[1], f"{counts[0]} for a new shape, {counts[1]} when it is repeated")


@on_device
def fallbacks(bench: Bench) -> Found:
    """Run a stable sort. Source: gaudi-pytorch-bridge 1.19.0, ``hpu_ops/backend/sort_gen.cpp``, shouldFallback."""
    given = bench.to_device(torch.arange(64.0).flip(0))
    with bench.fallbacks() as found:
        _ = torch.sort(given, stable=True)
    return Found(bool(found), f"counted: {found or 0}")
