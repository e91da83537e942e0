"""Ranks of the backend ``gaudi`` as threads, each with an emulated device of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers  # noqa: F401 - its lazy imports are not made for several threads at once

from support.backends.rank_threads import RankedBackend
from trencadis.clock import SystemClock
from trencadis.interfaces import AllocationPlan, Backend, Sampler
from trencadis.records import Bucket, ModelSource
from trencadis_gaudi.backend import GaudiBackend
from trencadis_gaudi.config import GaudiConfig
from trencadis_plugins.sampling.chain import standard_chain
from trencadis_plugins.sampling.standard import StandardSampler
from trencadis_testing.driver import BackendDriver, Work

MADE: list[RankedBackend] = []
"""What ``ranked_gaudi`` returned, for tests of engines that name it by its path; they take theirs out."""


def make_gaudi(**options: Any) -> GaudiBackend:
    """Return one rank before it joins, in lazy mode and unchecked unless asked otherwise."""
    config = GaudiConfig(**{"device": "emulated", "mode": "lazy", "check_model": False, **options})
    return GaudiBackend(config, clock=SystemClock())


def ranked_gaudi(size: int = 2, *, expert: int = 1, **options: Any) -> RankedBackend:
    """Return a backend of several ranks."""
    MADE.append(RankedBackend(lambda: make_gaudi(**options), size, expert=expert))
    return MADE[-1]


def load_gaudi(
    path: Path, plan: AllocationPlan | None, *, sampler: Sampler | None = None, dtype: str = "auto", **options: Any
) -> GaudiBackend:
    """Return a backend with a model, and with a cache if there is a plan."""
    backend = make_gaudi(**options)
    sampler = sampler or StandardSampler(standard_chain("vllm"))
    backend.load(ModelSource(path=str(path), dtype=dtype), sampler=sampler)
    if plan is not None:
        backend.allocate(plan)
    return backend


def drive(backend: Backend, plan: AllocationPlan, buckets: Sequence[Bucket], prompt: list[int]) -> BackendDriver:
    """Return a driver whose passes take the first bucket that covers them, with a prompt in row 0."""
    driver = BackendDriver(backend, plan, bucket=lambda shape: next(one for one in buckets if one.covers(shape)))
    driver.start(0, prompt)
    return driver


def generate(driver: BackendDriver, num_tokens: int) -> list[int]:
    """Return what the sequence in row 0 generates, a step each."""
    return [driver.step([Work(0)]).token_ids.tolist()[0] for _ in range(num_tokens)]
