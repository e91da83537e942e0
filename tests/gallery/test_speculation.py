"""Trees of docs/gallery/speculation.md promise what closed formulas say, and the script measures what it names."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from examples.gallery.speculation import measure

ROOT = Path(__file__).parents[2]
FIRST = measure.RATES[0]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, float]]:
    """What the shapes promise."""
    return measure.expected()


def test_a_line_promises_the_geometric_sum_and_lines_that_part_at_the_root_end_at_their_limit(rows) -> None:
    for row in rows:
        assert row["line"] == pytest.approx((1 - FIRST ** (row["size"] + 1)) / (1 - FIRST))
        length = row["size"] // 4
        assert row["4 lines"] == pytest.approx(1 + sum(measure.RATES) * (1 - FIRST**length) / (1 - FIRST))
    assert rows[-1]["line"] == pytest.approx(1 / (1 - FIRST), abs=1e-6)


def test_a_sequoia_tree_is_never_worse_and_gains_as_much_with_each_doubling(rows) -> None:
    assert all(row["sequoia"] >= max(row["line"], row["4 lines"]) - 1e-9 for row in rows)
    gains = [after["sequoia"] - before["sequoia"] for before, after in itertools.pairwise(rows)]
    assert all(0.3 < gain < 0.5 for gain in gains)


@pytest.mark.release
def test_the_script_measures_each_shape_and_length(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "The old man looked at the sea and"}\n')
    row = measure.bench(8, 1, measure.shapes(4)["sequoia"], prompts=prompts)
    assert 1 <= row["tokens_per_step"] <= 5
    assert 0 < row["drafts_per_step"] <= 4


def test_options_of_each_shape_are_options_of_the_drafter() -> None:
    from trencadis.registry import load_with_plugins

    for size in (4, 8, 16):
        for name, words in measure.shapes(size).items():
            resolved, _ = load_with_plugins(environ={}, flags=words)
            config = resolved.config.speculation.components["draft_model"]
            assert config.tree == {"line": "none", "4 lines": "static"}.get(name, name)
            if name == "4 lines":
                assert sum(4 for _ in config.tree_shape) == size, "four at each depth"


def test_the_page_shows_the_results_that_are_kept(rows) -> None:
    page = (ROOT / "docs" / "gallery" / "speculation.md").read_text(encoding="utf-8")
    for row in rows:
        assert f"| {row['size']} | {row['line']:.2f} | {row['4 lines']:.2f} | {row['sequoia']:.2f} |" in page
    kept = json.loads((ROOT / "examples" / "gallery" / "speculation" / "result.json").read_text(encoding="utf-8"))
    for size in dict.fromkeys(row["size"] for row in kept["trees"]):
        of_size = {row["shape"]: f"{row['tokens_per_step']:.2f}" for row in kept["trees"] if row["size"] == size}
        assert f"| {size} | " + " | ".join(of_size[name] for name in measure.shapes(size)) + " |" in page
    for row in kept["draft_lengths"]:
        low, high = row["speed_up_quartiles"][0], row["speed_up_quartiles"][2]
        cells = f"{row['tokens_per_step']:.2f} | {row['drafts_per_step']:.2f} | {row['speed_up']:.2f} ({low:.2f} to {high:.2f}) |"
        assert f"| {row['streams']} | `{row['draft_length']}` | {cells}" in page
