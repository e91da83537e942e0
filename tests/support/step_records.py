"""Synthetic steps: sizes as a server has them, and times that a known model says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from trencadis.records import StepShape
from trencadis_plugins.observer.recorder import FORMAT, bucket_fields
from trencadis_tools.simulation.step_times import LinearStepTimes, StepRecord

TRUE = LinearStepTimes(
    base_s=2e-3,
    token_s=3e-5,
    context_s=1e-7,
    product_s=2e-8,
    row_s=5e-5,
    host_base_s=4e-4,
    host_row_s=1e-5,
    host_new_s=1e-4,
)


def shapes(num_steps: int, seed: int = 0) -> Iterator[StepShape]:
    """Yield steps of decodes, of prefills, and of both."""
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        num_decodes = int(rng.integers(0, 33))
        num_prefills = int(rng.integers(0, 3)) if num_decodes else 1
        lengths = rng.integers(2, 600, num_prefills)
        starts = rng.integers(0, 800, num_prefills) * (rng.random(num_prefills) < 0.5)
        yield StepShape(
            num_decodes=num_decodes,
            num_decode_tokens=num_decodes,
            num_decode_context=int(rng.integers(1, 900, num_decodes).sum()),
            num_prefills=num_prefills,
            num_prefill_tokens=int(lengths.sum()),
            num_prefill_context=int((lengths + starts).sum()),
            prefill_products=float((lengths * starts + lengths * (lengths + 1) / 2).sum()),
            num_new=int((starts == 0).sum()),
        )


def steps_of(
    times: LinearStepTimes, some: Iterator[StepShape], *, noise: float = 0.0, seed: int = 1
) -> list[StepRecord]:
    """Return steps that take what ``times`` say, times 1 plus normal noise."""
    rng = np.random.default_rng(seed)
    found = []
    for shape in some:
        device_s = times.device_s(shape) * (1 + noise * rng.normal())
        host_s = times.host_s(shape) * (1 + noise * rng.normal())
        found.append(StepRecord(shape=shape, now_s=0.0, wall_s=device_s + host_s, device_s=device_s))
    return found


def write_steps(steps: list[StepRecord], path: Path) -> str:
    """Write steps as the recorder does, and return the path."""
    lines: list[dict[str, Any]] = [
        {"format": FORMAT, "model": {"architecture": "Llama"}, "processor": "a processor", "versions": {}}
    ]
    for step in steps:
        sizes = attrs.asdict(step.shape, recurse=False)
        sizes["buckets"] = [bucket_fields(bucket) for bucket in step.shape.buckets]
        times = {field.name: getattr(step, field.name) for field in attrs.fields(StepRecord) if field.name != "shape"}
        lines.append(times | sizes)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)
