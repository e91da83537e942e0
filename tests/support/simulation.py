"""Simulated runs of small engines with the built-in plugins, at sizes at which little fills a cache."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import Any

from trencadis.api import load_with_plugins
from trencadis.records import StepTime
from trencadis_tools.bench.schedule import Line
from trencadis_tools.simulation import Run, simulate
from trencadis_tools.workloads import Workload, WorkloadRequest

__all__ = ["BLOCK_TOKENS", "STEP_TIMES", "asked", "config_of", "mixed", "printed_under_hash_seeds", "run"]

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


def mixed(num_requests: int = 60, seed: int = 0, rate: float = 30.0) -> list[WorkloadRequest]:
    """Requests of three sessions, of which every other one follows the one before, and shared heads."""
    draws, time_s = random.Random(seed), 0.0
    requests: list[WorkloadRequest] = []
    last: dict[str, WorkloadRequest] = {}
    for i in range(num_requests):
        time_s += draws.expovariate(rate)
        session = f"s{i % 3}"
        before = last.get(session)
        if before is not None and i % 2 and before.num_prompt_tokens < 80:
            length = before.num_prompt_tokens + before.num_output_tokens + draws.randint(1, 9)
            more: dict[str, Any] = {"after": before.request_id, "think_s": draws.random() / 10}
        else:
            length = 24 + draws.randint(1, 40)
            more = {"block_ids": tuple(range(100 * (i % 3), 100 * (i % 3) + 6))}
        last[session] = asked(f"r{i}", time_s, length, draws.randint(1, 20), session=session, **more)
        requests.append(last[session])
    return requests


def printed_under_hash_seeds(program: str) -> set[bytes]:
    """Return what a program prints in processes with three different hash seeds: one text if it does not depend on them."""
    return {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("0", "1", "77")
    }
