"""Configurations of docs/gallery/shared_kv.md find what they can: less in caches of their own than in one for all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from examples.gallery.shared_kv.measure import CONFIGURATIONS, FOLDER, served

from trencadis.api import load_with_plugins
from trencadis_tools.workloads import Workload, load_workload

ROOT = Path(__file__).parents[2]
BLOCK = 512


def found_without_end(workload: Workload) -> int:
    """Tokens of whole blocks that a request before had, but for the last token of a prompt, which is always computed."""
    seen: set[int] = set()
    found = 0
    for one in workload.requests:
        for block in one.block_ids[: (one.num_prompt_tokens - 1) // BLOCK]:
            if block not in seen:
                break
            found += BLOCK
        seen.update(one.block_ids[: one.num_prompt_tokens // BLOCK])
    return found


def test_one_cache_for_all_finds_more_than_one_each_and_no_more_than_a_cache_without_end() -> None:
    """Requests are far apart but for some that come together, and caches are large enough for all of them."""
    workload = load_workload(str(FOLDER / "conversation.toml"), rate=0.05, limit=60)
    own, pool = (served(name, workload).num_prompt_tokens_cached for name in ("own", "pool"))
    bound = found_without_end(workload)
    assert 0 < own < pool <= bound
    assert pool > 0.95 * bound


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_caches_are_as_large_as_the_page_says(name: str) -> None:
    resolved, _ = load_with_plugins(file=FOLDER / f"{name}.toml", environ={})
    large = name in ("affinity_large", "pool")
    assert (resolved.config.cache.num_blocks, resolved.config.cache.block_size) == (3200 if large else 800, BLOCK)


def test_the_page_shows_the_results_that_are_kept() -> None:
    page = (ROOT / "docs" / "gallery" / "shared_kv.md").read_text(encoding="utf-8")
    for row in json.loads((ROOT / "benchmarks" / "results" / "gallery" / "shared_kv.json").read_text(encoding="utf-8")):
        shares = (
            f"{row['hit_ratio']:.1%} | {row['ttft_mean']:.2f} s | {row['ttft_p99']:.1f} s | {row['within_targets']:.1%}"
        )
        assert f"| `{row['name']}` | {shares.replace('%', ' %')} |" in page
