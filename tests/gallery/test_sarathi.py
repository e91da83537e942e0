"""The results of docs/gallery/sarathi.md: chunks bound the time between tokens, whole prompts do not."""

from __future__ import annotations

import numpy as np
import pytest
from examples.gallery.sarathi.measure import CONFIGS, HERE, OBJECTIVES_S, STEP_TIMES, Row, capacity, measure

from support.strategies.gallery_pages import page_of, results_of
from trencadis.records import StepShape
from trencadis_tools.compare.statistics import run_interval
from trencadis_tools.simulation.step_times import load_step_times
from trencadis_tools.workloads import Workload
from trencadis_tools.workloads.workload_file import read_recipe

NUM_REQUESTS = 16


def short(seed: int) -> Workload:
    """Prompts as long as those of the page, shorter answers."""
    lengths = {"output": {"kind": "uniform", "min": 20, "max": 60}}
    changes = {"seed": seed, "limit": NUM_REQUESTS, "arrivals": {"rate": 8.0}, "lengths": lengths}
    return read_recipe(str(HERE / "chats.toml"), changes=changes).make()


def test_chunks_bound_the_time_between_tokens_and_whole_prompts_do_not() -> None:
    pairs = [[measure(config, short(seed), 8.0) for config in ("prefill_first", "chunked_512")] for seed in range(4)]
    num_context = NUM_REQUESTS * 8192
    largest_step = StepShape(
        num_decodes=NUM_REQUESTS,
        num_decode_tokens=NUM_REQUESTS,
        num_decode_context=num_context,
        num_prefills=NUM_REQUESTS,
        num_prefill_tokens=512,
        num_prefill_context=num_context,
        prefill_products=512 * 8192,
    )
    bound_s = load_step_times(STEP_TIMES).device_s(largest_step)
    for whole, chunked in pairs:
        assert chunked.tbt_max_s <= bound_s < whole.tbt_max_s
    interval = run_interval(np.array([chunked.tbt_p99_s - whole.tbt_p99_s for whole, chunked in pairs]))
    assert interval.high < 0


def test_a_capacity_is_the_last_rate_before_an_objective_is_missed() -> None:
    def row(rate: float, tbt_p99_s: float, ttft_p50_s: float = 0.1) -> Row:
        return Row(config="one", rate=rate, tbt_p99_s=tbt_p99_s, tbt_max_s=9.0, ttft_p50_s=ttft_p50_s, ttft_p99_s=9.0)

    rows = [row(4, 0.1), row(1, 0.1), row(2, 0.2), row(3, 0.1), row(5, 0.1, ttft_p50_s=2.1)]
    assert [capacity(rows, objective_s) for objective_s in (0.05, 0.1, 0.2)] == [0.0, 1, 4]


def test_the_page_shows_the_results_that_are_kept() -> None:
    page = page_of("sarathi")
    kept = results_of("sarathi")
    rows = [Row(**row) for row in kept]
    for config in CONFIGS:
        own = [row for row in rows if row.config == config]
        assert f"| `{config}` | {' | '.join(f'{capacity(own, one):g}' for one in OBJECTIVES_S)} |" in page
    for rate in sorted({row.rate for row in rows}):
        shown = [
            f"{row.tbt_p99_s:.3f}" for config in CONFIGS for row in rows if (row.config, row.rate) == (config, rate)
        ]
        assert f"| {rate:g} | {' | '.join(shown)} |" in page


@pytest.mark.nightly
def test_kept_results_are_what_the_script_measures() -> None:
    from trencadis_tools.workloads import load_workload

    kept = results_of("sarathi")
    (row,) = [row for row in kept if (row["config"], row["rate"]) == ("chunked_512", 2.0)]
    again = measure("chunked_512", load_workload(str(HERE / "chats.toml"), rate=2.0), 2.0)
    assert again.tbt_p99_s == pytest.approx(row["tbt_p99_s"])
