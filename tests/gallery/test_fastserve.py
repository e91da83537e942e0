"""The result of docs/gallery/fastserve.md: feedback queues with preemption begin answers sooner where requests wait."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from examples.gallery.fastserve.measure import HERE, serve

from support.strategies.gallery_pages import page_of
from trencadis_tools.compare.statistics import run_interval
from trencadis_tools.simulation import Run
from trencadis_tools.workloads.workload_file import read_recipe

ROOT = Path(__file__).parents[2]
QUANTA = {"skip_join": "tokens", "skip_join_time": "time"}


def served(config: str, seed: int) -> Run:
    """Serve forty requests with shorter answers that come faster than four rows take them."""
    lengths = {"output": {"kind": "lognormal", "mean": 80, "cv": 3.0, "max": 1000}}
    changes = {"seed": seed, "limit": 40, "arrivals": {"rate": 8.0}, "lengths": lengths}
    return serve(config, read_recipe(str(HERE / "skewed.toml"), changes=changes).make(), max_num_seqs=4)


@pytest.mark.parametrize("queues", ["skip_join", pytest.param("skip_join_time", marks=pytest.mark.nightly)])
def test_feedback_queues_begin_answers_sooner_and_preempt_for_it(queues: str) -> None:
    pairs = [(served("fcfs", seed), served(queues, seed)) for seed in range(3)]
    means = [[np.mean([one.ttft_s for one in run.records]) for run in pair] for pair in pairs]
    assert run_interval(np.array([np.log(queues / fcfs) for fcfs, queues in means])).high < 0
    assert all(fcfs.num_preemptions == 0 < queues.num_preemptions for fcfs, queues in pairs)


def test_the_page_shows_the_results_that_are_kept() -> None:
    page = page_of("fastserve")
    results = ROOT / "benchmarks" / "results" / "gallery"
    for row in json.loads((results / "fastserve_overload.json").read_text(encoding="utf-8")):
        times = f"{row['fcfs_s']:.3g} | {row['queues_s']:.3g}"
        mean = f"{row['mean_ratio']:.2f} ({row['mean_low']:.2f} to {row['mean_high']:.2f})"
        p90 = f"{row['p90_ratio']:.2f} ({row['p90_low']:.2f} to {row['p90_high']:.2f})"
        quanta = QUANTA[row["queues"]]
        numbers = f"{quanta} | {times} | {mean} | {p90} | {row['num_preemptions']:.0f}"
        assert f"| `{row['workload']}` | {row['rate']:g} | {numbers} |" in page
