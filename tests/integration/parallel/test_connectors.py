"""KV connectors of engines whose ranks are processes: what one layout of ranks saved another one loads, and a lost rank costs no request."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from support.kv.redis_server import running_redis
from support.parallel_requests import PROMPTS
from trencadis import LLM, SamplingParams
from trencadis.errors import ConfigValueError

LONG = [f"{one} {one}" for one in PROMPTS[:4]]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROCESSES = {"executor.name": "processes"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp 2": {**PROCESSES, "parallel.tensor": 2},
    "tp 4": {**PROCESSES, "parallel.tensor": 4},
    "pp 2": {**PROCESSES, "parallel.pipeline": 2},
}
SMALL = {
    "cache.num_blocks": 96,
    "cache.block_size": 8,
    "engine.max_num_seqs": 6,
    "engine.max_num_batched_tokens": 64,
    "observer.names": [],
    "kv_policy.name": "always",
}


def on_disk(path: Path, **more: Any) -> dict[str, Any]:
    """Return the configuration of a directory whose objects every layout of the demo model can use."""
    table = {
        "path": str(path),
        "head_groups": 4,
        "layer_starts": range(8),
        "close_timeout_s": 60,
        "lookup_timeout_s": 60,
    }
    settings = {"kv_connector.name": "filesystem", **{f"kv_connector.filesystem.{key}": table[key] for key in table}}
    return {**SMALL, **settings, "kv_connector.filesystem.layer_starts": list(range(8)), **more}


def served(prompts: list[str] = LONG, **config: Any) -> tuple[list[Any], list[int]]:
    """Return the tokens of each prompt, and how many of its own came from the cache."""
    with LLM(**config) as llm:
        return tokens_of(llm, prompts)


def tokens_of(llm: LLM, prompts: list[str] = LONG) -> tuple[list[Any], list[int]]:
    outputs = llm.generate(prompts, GREEDY)
    return [one.outputs[0].token_ids for one in outputs], [one.num_cached_tokens for one in outputs]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return served(**SMALL)[0]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``stores(layout)`` is a directory with what an engine of this layout saved, and what that said."""
    made: dict[str, tuple[Path, list[Any]]] = {}

    def filled(layout: str) -> tuple[Path, list[Any]]:
        if layout not in made:
            path = tmp_path_factory.mktemp("blocks")
            found, _ = served(**on_disk(path), **LAYOUTS[layout])
            made[layout] = path, found
        return made[layout]

    return filled


@pytest.mark.nightly  # parts of blocks between layouts: tests/testing/test_kv_ranks.py
@pytest.mark.parametrize(("read", "written"), [*itertools.product(LAYOUTS, LAYOUTS)])
def test_greedy_tokens_are_the_same_with_a_store_that_another_layout_filled(stores, read, written):
    path, expected = stores(written)
    found, num_cached = served(**on_disk(path, **{"kv_connector.filesystem.saves": False}), **LAYOUTS[read])
    assert found == expected
    assert all(number >= 24 for number in num_cached), "prefixes of three blocks and more were saved"


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["tp 2", "pp 2"])
def test_host_memory_before_a_directory_serves_what_the_device_has_no_room_for(tmp_path, expected, layout):
    config = on_disk(tmp_path, **{"kv_connector.name": "tiered", "cache.num_blocks": 18})
    with LLM(**config, **LAYOUTS[layout]) as llm:
        assert tokens_of(llm)[0] == expected
        for _ in range(3):
            found, num_cached = tokens_of(llm, LONG[::-1])
            assert found == expected[::-1]
        assert all(num_cached)
        metrics = llm._frontend.engine.engine.metrics()
    loads = [line for line in metrics.splitlines() if line.startswith("trencadis_kv_tokens_total")]
    by_tier = {
        tier: sum(float(line.split()[-1]) for line in loads if f'tier="{tier}"' in line and 'direction="load"' in line)
        for tier in ("host_offload", "filesystem")
    }
    assert by_tier["host_offload"] > 0, loads


@pytest.mark.nightly
def test_a_server_is_reached_by_every_rank(expected):
    with running_redis() as server:
        config = {
            **SMALL,
            "kv_connector.name": "redis",
            "kv_connector.redis.url": server.url,
            "kv_connector.redis.head_groups": 2,
            "kv_connector.redis.close_timeout_s": 60,
            "kv_connector.redis.lookup_timeout_s": 60,
        }
        assert served(**config, **LAYOUTS["tp 2"]) == (expected, [0] * len(expected))
        found, num_cached = served(**config)
    assert found == expected
    assert all(num_cached)


@pytest.mark.nightly
@pytest.mark.parametrize("delay_s", [0.02, 0.1, 0.3, 0.6])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_between_loads_and_saves_costs_no_request(expected, tmp_path, victim, delay_s):
    config = on_disk(tmp_path, **{"cache.num_blocks": 18, "kv_connector.filesystem.load_share": 1.0})
    with LLM(**config, **LAYOUTS["tp 2"]) as llm:
        tokens_of(llm)
        executor = llm._frontend.engine.engine._executor
        pid = executor._ranks[victim].pid
        timer = threading.Timer(delay_s, os.kill, (pid, signal.SIGKILL))
        timer.start()
        while executor._ranks[victim].pid == pid or timer.is_alive():
            found, _ = tokens_of(llm, LONG * 3)
            assert found == expected * 3
        found, num_cached = tokens_of(llm, LONG)
        assert found == expected
        assert any(num_cached), "worker sides of the new ranks load"
    found, _ = served(**on_disk(tmp_path))
    assert found == expected, "what was half written is served to nobody"


@pytest.mark.nightly
def test_ranges_that_the_ranks_do_not_hold_are_refused_at_the_start(tmp_path):
    config = on_disk(tmp_path, **{"kv_connector.filesystem.head_groups": 2})
    with pytest.raises(ConfigValueError, match=r"\[kv_connector.filesystem\] head_groups .* to a multiple of 4"):
        LLM(**config, **LAYOUTS["tp 4"])
