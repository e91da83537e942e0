"""The device under test, with helpers for checks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cached_property, wraps
from typing import Any

import torch

from trencadis.clock import SystemClock
from trencadis_gaudi.checks.records import Found
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.graphs.counts import Compilations
from trencadis_gaudi.habana import Habana, load_habana

__all__ = ["UNCOUNTED", "Bench", "error_of", "on_device"]

UNCOUNTED = Found(None, "not tested: the metric graph_compilation counts nothing")


class Bench:
    """A device in one mode, opened at its first use.

    Args:
        config: Table ``[backend.gaudi]``, with the mode.

    Attributes:
        config: Table ``[backend.gaudi]``, with the mode.
        counts: Whether the metric ``graph_compilation`` counts.
        served: Result of serving with an engine, set by ``engine.py``; None before.
        reference: Result of serving with the backend ``torch``; None before.
    """

    def __init__(self, config: GaudiConfig) -> None:
        self.config = config
        self.counts = True
        self.served: Any = None
        self.reference: Any = None

    @cached_property
    def habana(self) -> Habana:
        """Device and its software."""
        return load_habana(self.config, clock=SystemClock())

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device, after its transfer."""
        moved = tensor.to(self.habana.device)
        self.flush()
        return moved

    def flush(self) -> None:
        """Run the gathered operations, and wait for them."""
        self.habana.mark_step()
        self.habana.hpu.synchronize()

    @contextlib.contextmanager
    def compilations(self) -> Iterator[Compilations]:
        """Count the programs compiled within a ``with`` block."""
        found = Compilations()
        with self.habana.hpu.metrics.metric_localcontext("graph_compilation") as metric:
            yield found
            self.flush()
            found.number = int(metric.stats()[0][1])

    @contextlib.contextmanager
    def fallbacks(self) -> Iterator[dict[str, int]]:
        """Count the operations that run on the host within a ``with`` block, by name."""
        found: dict[str, int] = {}
        with self.habana.hpu.metrics.metric_localcontext("cpu_fallback") as metric:
            yield found
            self.flush()
            stats = dict(metric.stats())
        found.update(stats.get("FallbackOps", {}))
        if stats["TotalNumber"] and not found:
            found["not named"] = int(stats["TotalNumber"])


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference divided by the norm of the expected tensor. Pure."""
    wanted = expected.float()
    return float((found.cpu().float() - wanted).norm() / wanted.norm())


def on_device(check: Callable[[Bench], Found]) -> Callable[[Bench], Found]:
    """Return a check that runs in the context of an engine's step."""

    @wraps(check)
    def run(bench: Bench) -> Found:
        with bench.habana.active(), torch.inference_mode():
            return check(bench)

    return run
