"""Backends ``torch`` with a tiny model, and their logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support.backends.tiny_models import VOCAB_SIZE, prompt
from trencadis.clock import SystemClock
from trencadis.interfaces import AllocationPlan, Sampler
from trencadis.records import ModelSource
from trencadis_testing.backend import ArgmaxSampler
from trencadis_torch.backend import TorchBackend
from trencadis_torch.config import TorchConfig
from trencadis_torch.loading.self_check import paged_logits

PLAN = AllocationPlan(num_blocks=60, block_size=4, num_rows=4, max_model_len=120, max_num_batched_tokens=64)
PROMPTS = {0: prompt(19), 1: prompt(5, seed=1), 3: prompt(33, seed=2)}


def make_torch(layout: str = "ragged", **options: Any) -> TorchBackend:
    return TorchBackend(TorchConfig(**{"device": "cpu", "layout": layout, **options}), clock=SystemClock())


def load_torch(
    path: Path,
    *,
    plan: AllocationPlan | None = PLAN,
    sampler: Sampler | None = None,
    dtype: str = "auto",
    **options: Any,
) -> TorchBackend:
    """Return a backend with a model, and with a cache if there is a plan."""
    backend = make_torch(**options)
    backend.load(ModelSource(path=str(path), dtype=dtype), sampler=sampler or ArgmaxSampler())
    if plan is not None:
        backend.allocate(plan)
    return backend


@torch.inference_mode()
def logits_of(backend: Any, model: Any = None) -> torch.Tensor:
    """Return paged logits of a backend that is loaded, in chunks and steps of one token."""
    sequences = [torch.arange(n) * 7 % VOCAB_SIZE for n in (26, 13)]
    layout, kernel = backend._config.layout, backend._kernel
    return torch.cat(paged_logits(model or backend._model, backend._layers, sequences, layout, kernel))
