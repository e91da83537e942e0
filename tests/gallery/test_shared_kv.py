"""Configurations of docs/gallery/shared_kv.md find what they can: less in caches of their own than in a pool for all."""

from __future__ import annotations

import math

import pytest
from examples.gallery.shared_kv.measure import CONFIGURATIONS, FOLDER, capacity, served

from support.strategies.gallery_pages import page_of, results_of
from trencadis.api import load_with_plugins
from trencadis_tools.workloads import Workload, load_workload

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


@pytest.mark.parametrize("num_requests", [60, pytest.param(200, marks=pytest.mark.nightly)])
def test_a_pool_finds_nearly_all_that_there_is_and_caches_of_their_own_less(num_requests: int) -> None:
    """Only requests that come together find nothing of each other: the pool has room for all of them."""
    workload = load_workload(str(FOLDER / "conversation.toml"), rate=0.5, limit=num_requests)
    own, pool = (served(name, workload).num_prompt_tokens_cached for name in ("own", "pool_190"))
    bound = found_without_end(workload)
    assert 0 < own <= pool <= bound
    if num_requests == 200:
        assert own < 0.7 * bound
        assert pool > 0.95 * bound


@pytest.mark.parametrize(("name", "num_tokens", "is_shared"), [("host", 1 << 20, False), ("pool", 4 << 20, True)])
def test_stores_are_as_large_as_the_page_says(name: str, num_tokens: int, is_shared: bool) -> None:
    resolved, _ = load_with_plugins(file=FOLDER / f"{name}.toml", environ={})
    store = resolved.config.kv_connector.components["simulated_store"]
    assert (store.capacity_bytes, store.shared) == (num_tokens * 131_072, is_shared)
    assert (resolved.config.cache.num_blocks, resolved.config.cache.block_size) == (800, BLOCK)


def test_the_capacity_is_on_the_line_between_the_rates_around_it() -> None:
    rows = [{"name": "a", "rate": rate, "within_targets": share} for rate, share in ((1, 0.98), (2, 0.94), (3, 0.84))]
    assert capacity(rows, "a") == pytest.approx(2.4)
    assert math.isnan(capacity(rows[:2], "a"))


def test_the_page_shows_the_results_that_are_kept() -> None:
    page = page_of("shared_kv")
    rows = results_of("shared_kv")
    for name in CONFIGURATIONS:
        at = {row["rate"]: row for row in rows if row["name"] == name}
        shares = " | ".join(f"{at[rate]['within_targets']:.1%}" for rate in sorted(at))
        assert f"| `{name}` | {shares} | {capacity(rows, name):.2f} |".replace("%", " %") in page
        row = at[1.75]
        loads = f"{row['num_loads']} | {row['num_late_loads']} | {row['num_declined_loads']} | {row['load_mean']:.2f} s"
        told = f"{row['hit_ratio']:.1%} | {row['ttft_mean']:.2f} s | {row['ttft_p99']:.1f} s | {loads} | {row['link_busy']:.1%}"
        assert f"| `{name}` | {told} |".replace("%", " %") in page
