"""Configurations of docs/gallery/shared_kv.md find what they can: less in caches of their own than in one for all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trencadis.api import load_with_plugins
from trencadis_tools.simulation import Run, simulate
from trencadis_tools.simulation.step_times import load_step_times
from trencadis_tools.workloads import Workload, load_workload

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "gallery" / "shared_kv"
BLOCK = 512


def served(name: str, workload: Workload, *, replicas: int, step_times: str) -> Run:
    resolved, registry = load_with_plugins(file=FOLDER / f"{name}.toml", environ={})
    return simulate(resolved.config, registry, workload, step_times=load_step_times(step_times), replicas=replicas)


def found_without_end(workload: Workload) -> int:
    """Tokens of whole blocks that a request before had, but for the last token of a prompt, which is always computed."""
    seen: set[int] = set()
    found = 0
    for one in workload.requests:
        known = 0
        for block in one.block_ids[: (one.num_prompt_tokens - 1) // BLOCK]:
            if block not in seen:
                break
            known += BLOCK
        seen.update(one.block_ids)
        found += known
    return found


def test_one_cache_for_all_finds_more_than_one_each_and_no_more_than_a_cache_without_end() -> None:
    """Requests come one after the other, so that every one before has ended, and caches are large enough for all of them."""
    workload = load_workload(str(FOLDER / "conversation.toml"), rate=0.05, limit=60)
    pool = served("pool", workload, replicas=1, step_times="a100:llama_3_1_8b:tp4")
    own = served("own", workload, replicas=4, step_times="a100:llama_3_1_8b")
    assert pool.num_prompt_tokens_cached == found_without_end(workload)
    assert 0 < own.num_prompt_tokens_cached < pool.num_prompt_tokens_cached


@pytest.mark.parametrize("name", ["own", "affinity", "affinity_large", "pool"])
def test_caches_are_as_large_as_the_page_says(name: str) -> None:
    resolved, _ = load_with_plugins(file=FOLDER / f"{name}.toml", environ={})
    large = name in ("affinity_large", "pool")
    assert (resolved.config.cache.num_blocks, resolved.config.cache.block_size) == (3200 if large else 800, BLOCK)
