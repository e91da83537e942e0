"""The script of docs/gallery/bucketing.md measures a fitted table on the half of a trace that it was not fitted on."""

from __future__ import annotations

import json
from pathlib import Path

from examples.gallery.bucketing.measure import BUDGETS, TRACES, measure, write_halves

from trencadis_tools.workloads import load_workload

RESULT = Path(__file__).parents[2] / "examples" / "gallery" / "bucketing" / "result.json"


def test_halves_are_a_trace_in_two_parts_that_each_begin_at_0(tmp_path: Path) -> None:
    whole = load_workload("azure_code", limit=11).requests
    first, second = (load_workload(str(file)).requests for file in write_halves("azure_code", tmp_path, 11))
    sizes = [(one.num_prompt_tokens, one.num_output_tokens) for one in whole]
    assert [(one.num_prompt_tokens, one.num_output_tokens) for one in (*first, *second)] == sizes
    assert (len(first), len(second), first[0].arrival_s, second[0].arrival_s) == (5, 6, 0.0, 0.0)


def test_each_budget_is_kept_and_has_a_row_beside_the_exponential_table(tmp_path: Path) -> None:
    rows = measure("azure_code", TRACES["azure_code"], tmp_path, 40)
    assert [row.table for row in rows] == ["exponential", *(f"fitted, {budget}" for budget in BUDGETS)]
    assert all(row.buckets <= budget for row, budget in zip(rows[1:], BUDGETS, strict=True))
    assert all(row.prompt_padding >= 0 and row.decode_padding >= 0 for row in rows)


def test_the_page_shows_the_results_that_are_kept() -> None:
    page = (RESULT.parents[3] / "docs" / "gallery" / "bucketing.md").read_text(encoding="utf-8")
    for row in json.loads(RESULT.read_text(encoding="utf-8")):
        shown = [f"{row[key]:.1%}".replace("%", " %") for key in ("prompt_padding", "decode_padding", "time_padding")]
        assert f"| {row['buckets']} | {row['warmup_s']:.0f} s | {' | '.join(shown)} |" in page
