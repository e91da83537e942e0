"""Tokens a step of draft trees by shape and size, and what chosen draft lengths are worth under load, on the demo model.

    python examples/gallery/speculation/measure.py --expected
    python examples/gallery/speculation/measure.py [--json FILE] [--max-tokens N] [--sizes 4,8] [--streams 1,8]

The first form computes what the shapes promise for given acceptance rates, as the paper's figures do, and needs no model.
The second measures, by `trencadis bench speculation`. Tokens a step follow from the texts and are the same everywhere; the speed-ups are
ratios of CPU time of pairs of runs in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

from trencadis.cli import main as trencadis
from trencadis.console import print_table
from trencadis_plugins.speculation.draft_tree_shapes import TreeShape, best_shape, chain, expected_tokens

PROMPTS = Path(__file__).with_name("prompts.jsonl")

QUIET = ("--log.level", "error", "--budget.speculation-ms", "0", "--budget.draft-length-ms", "0")
"""A busy machine must not switch the drafts off that are to be measured."""


RATES = (0.65, 0.12, 0.06, 0.04)
"""How often the most likely draft after a token is the right one, the second, the third, the fourth; the first as on the demo pair."""

NUM_ROUNDS = 8
"""Times that the prompts are answered, where times are measured."""

EXPECTED_SIZES = (4, 8, 16, 32, 64, 128, 256)


def expected(rates: tuple[float, ...] = RATES, sizes: tuple[int, ...] = EXPECTED_SIZES) -> list[dict[str, float]]:
    """Return the tokens a step that each shape promises, by number of drafts."""
    return [
        {
            "size": size,
            "line": expected_tokens(chain(size), rates),
            "4 lines": expected_tokens(lines(size), rates),
            "sequoia": expected_tokens(best_shape(rates, size=size, depth=size), rates),
        }
        for size in sizes
    ]


def lines(size: int, width: int = 4) -> TreeShape:
    """Return lines that part at the root, of equal length."""
    parents = [-1 if draft < width else draft - width for draft in range(size)]
    return TreeShape(tuple(parents), tuple(draft if draft < width else 0 for draft in range(size)))


def shapes(size: int) -> dict[str, tuple[str, ...]]:
    """Return the options of trees with at most `size` drafts."""
    chains = [4, *[1] * (size // 4 - 1)]
    return {
        "line": ("--speculation.draft_model.tree", "none"),
        "4 lines": (
            "--speculation.draft_model.tree=static",
            f"--speculation.draft_model.tree-shape={','.join(map(str, chains))}",
        ),
        "top_k": ("--speculation.draft_model.tree=top_k", *deep(size)),
        "sequoia": ("--speculation.draft_model.tree=sequoia", *deep(size)),
    }


def deep(size: int) -> tuple[str, ...]:
    """Return the bounds of trees that grow by themselves."""
    return (f"--speculation.draft_model.tree-depth={min(size, 8)}", "--speculation.draft_model.tree-width=4")


def bench(max_tokens: int, streams: int, options: tuple[str, ...], *, prompts: Path = PROMPTS) -> dict[str, Any]:
    """Run the command for `draft_model`; return its row."""
    words = ["bench", "speculation", "--drafters", "draft_model", "--prompts", str(prompts), "--json"]
    words += ["--max-tokens", str(max_tokens), "--streams", str(streams), *QUIET, *options]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = trencadis(words)
    if code:
        raise SystemExit(f"trencadis {' '.join(words)} ended with {code}")
    (row,) = json.loads(printed.getvalue())
    assert row["num_same_texts"] == row["num_prompts"], "speculation changed a text"
    return {
        key: round(row[key], 3) for key in ("tokens_per_step", "drafts_per_step", "acceptance_ratio", "speed_up")
    } | {"speed_up_quartiles": [round(value, 3) for value in row["speed_up_quartiles"]]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--sizes", default="4,8,16", metavar="N,N", help="drafts of a tree; 4 or more")
    parser.add_argument("--streams", default="1,12", metavar="N,N", help="requests at once, for draft lengths")
    parser.add_argument("--expected", action="store_true", help="only what the shapes promise")
    args = parser.parse_args()
    if args.expected:
        cells = [
            (f"{row['size']}", *(f"{row[name]:.2f}" for name in ("line", "4 lines", "sequoia"))) for row in expected()
        ]
        print_table(("drafts", "line", "4 lines", "sequoia"), cells)
        return
    trees = [
        {
            "shape": name,
            "size": size,
            **bench(args.max_tokens, 1, (f"--speculation.draft_model.max-draft-tokens={size}", *options)),
        }
        for size in map(int, args.sizes.split(","))
        for name, options in shapes(size).items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        repeated = Path(folder) / "prompts.jsonl"
        # So that there are pairs of runs, whose ratios count, with twelve requests at once too.
        repeated.write_text(PROMPTS.read_text() * NUM_ROUNDS)
        lengths = [
            {"draft_length": name, "streams": streams}
            | bench(args.max_tokens, streams, ("--draft_length.name", name), prompts=repeated)
            for streams in map(int, args.streams.split(","))
            for name in ("fixed", "goodput")
        ]
    if args.json:
        args.json.write_text(json.dumps({"trees": trees, "draft_lengths": lengths}, indent=1) + "\n")
    print_table(
        ("drafts", "shape", "tokens/step", "drafts/step", "accepted"),
        [(f"{row['size']}", row["shape"], *shown(row)) for row in trees],
    )
    print_table(
        ("requests", "draft length", "tokens/step", "drafts/step", "accepted", "CPU speed-up (quartiles)"),
        [
            (
                f"{row['streams']}",
                row["draft_length"],
                *shown(row),
                f"{row['speed_up']:.2f} ({row['speed_up_quartiles'][0]:.2f} to {row['speed_up_quartiles'][2]:.2f})",
            )
            for row in lengths
        ],
    )


def shown(row: dict[str, Any]) -> tuple[str, str, str]:
    """Return what both tables show of a row."""
    return f"{row['tokens_per_step']:.2f}", f"{row['drafts_per_step']:.2f}", f"{row['acceptance_ratio']:.1%}"


if __name__ == "__main__":
    main()
