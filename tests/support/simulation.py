"""Simulated runs of small engines with the built-in plugins, at sizes at which little fills a cache."""

from __future__ import annotations

from typing import Any

from trencadis.api import load_with_plugins
from trencadis.records import StepTime
from trencadis_tools.bench.schedule import Line
from trencadis_tools.simulation import Run, simulate
from trencadis_tools.workloads import Workload, WorkloadRequest

__all__ = ["BLOCK_TOKENS", "asked", "config_of", "run"]

STEP_TIMES = Line(StepTime(base_s=0.02, token_s=1e-4, context_token_s=1e-6))
BLOCK_TOKENS = 4
SIZES: dict[str, dict[str, Any]] = {
    "model": {"path": "demo"},
    "engine": {"max_num_seqs": 4, "max_num_batched_tokens": 64},
    "cache": {"num_blocks": 128, "block_size": BLOCK_TOKENS},
}


def config_of(**tables: dict[str, Any]) -> Any:
    """Return configuration and registry of small engines; tables of the configuration by name, over ``SIZES``."""
    overrides = {name: {**SIZES.get(name, {}), **tables.get(name, {})} for name in {**SIZES, **tables}}
    resolved, registry = load_with_plugins(environ={}, overrides=overrides)
    return resolved.config, registry


def run(requests: list[WorkloadRequest], tables: dict[str, Any] | None = None, **options: Any) -> Run:
    """Return a simulated run."""
    config, registry = config_of(**(tables or {}))
    workload = Workload(name="test", requests=tuple(requests), block_tokens=BLOCK_TOKENS)
    return simulate(config, registry, workload, **{"step_times": STEP_TIMES, **options})


def asked(name: str, arrival_s: float = 0.0, prompt: int = 20, output: int = 5, **more: Any) -> WorkloadRequest:
    """Return a request."""
    return WorkloadRequest(
        request_id=name, arrival_s=arrival_s, num_prompt_tokens=prompt, num_output_tokens=output, **more
    )
