"""``trencadis bench speculation``: comparison of drafters on one list of prompts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from trencadis.api import Config, Registry
from trencadis.console import print_table
from trencadis.errors import ConfigValueError

if TYPE_CHECKING:
    from trencadis_tools.bench import SpeculationResult

__all__ = ["HELP", "add_arguments", "run"]

HELP = "drafters on --prompts: what stands, tokens a step, CPU time against no speculation"

_PROMPTS = (
    "The old man looked at the sea and",
    "Alice was beginning to get very tired of sitting by her sister on the bank",
    "Good morrow, sir. What news from the city?",
    "Shall I compare thee to a summer's day?",
)
"""Prompts without ``--prompts``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement; ``--max-requests`` and ``--json`` are shared."""
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--drafters", metavar="A,B,...", help="which speculators (default: all); none measures the noise"
    )
    group.add_argument("--prompts", metavar="FILE", help="a JSON object a line: prompt, turns or messages")
    group.add_argument(
        "--max-tokens",
        dest="spec_max_tokens",
        type=int,
        default=128,
        metavar="N",
        help="output tokens of each (default: 128)",
    )
    group.add_argument(
        "--temperature", dest="spec_temperature", type=float, default=0.0, metavar="T", help="0 for greedy (default: 0)"
    )
    group.add_argument(
        "--rounds",
        type=int,
        default=1,
        metavar="N",
        help="runs of each prompt, none of which remembers its answers in another (default: 1)",
    )
    group.add_argument("--streams", type=int, default=1, metavar="N", help="prompts served at once (default: 1)")


def run(args: argparse.Namespace, config: Config, registry: Registry) -> int:
    """Measure and print; returns 0.

    Raises:
        ConfigError: The prompts cannot be read, or a flag makes no sense.
        TrencadisError: An engine cannot be built, or a request failed.
    """
    from trencadis.api import load_tokenizer
    from trencadis_tools.bench import SpeculationWorkload, measure_speculation, read_prompts

    if args.rounds < 1:
        raise ConfigValueError(
            f"--rounds {args.rounds}: it must be 1 or more.", hint="Leave it out to run each prompt once."
        )
    drafters = _drafters(args.drafters, registry)
    model = config.model
    tokenizer = load_tokenizer(model.path, revision=model.revision, trust_remote_code=model.trust_remote_code)
    if args.prompts is None:
        prompts = tuple(tokenizer.encode(text) for text in _PROMPTS)
    else:
        prompts = read_prompts(Path(args.prompts), tokenizer, limit=args.limit or 0)
    try:
        workload = SpeculationWorkload(
            prompts=prompts * args.rounds,
            max_tokens=args.spec_max_tokens,
            temperature=args.spec_temperature,
            num_streams=args.streams,
        )
    except ValueError as error:
        raise ConfigValueError(f"trencadis bench speculation: {error}.") from error
    results = measure_speculation(config, registry, workload, drafters=drafters)
    if args.json:
        print(json.dumps([attrs.asdict(result) for result in results]))
        return 0
    headings = (
        "drafter",
        "tokens/step",
        "drafts/step",
        "drafted in",
        "took",
        "accepted",
        "by position",
        "CPU speed-up (quartiles)",
        "same text",
    )
    print_table(headings, [_row(result) for result in results])
    return 0


def _drafters(given: str | None, registry: Registry) -> tuple[str, ...]:
    names = tuple(name.strip() for name in (given or "").split(",") if name.strip())
    return names or tuple(registry.components("speculation"))


def _row(result: SpeculationResult) -> tuple[str, ...]:
    low, _, high = result.speed_up_quartiles
    return (
        result.drafter,
        f"{result.tokens_per_step:.2f}",
        f"{result.drafts_per_step:.2f}",
        f"{result.drafted_ratio:.0%}",
        f"{1e6 * result.draft_s:.0f} us",
        f"{100 * result.acceptance_ratio:.1f} %",
        " ".join(f"{ratio:.2f}" for ratio in result.acceptance_by_position),
        f"{result.speed_up:.2f} ({low:.2f} to {high:.2f})",
        f"{result.num_same_texts} of {result.num_prompts}",
    )
