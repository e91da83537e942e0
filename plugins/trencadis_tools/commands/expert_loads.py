"""``trencadis expert-loads``: convert a page of metrics to the file of ``[backend.torch] expert_loads``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from trencadis.errors import ConfigValueError
from trencadis.faults import cut
from trencadis.files import read_text

__all__ = ["TAKES_CONFIG", "add_arguments", "read_page", "run_alone"]

TAKES_CONFIG = False
"""The command uses no configuration."""

_MAX_SHOWN = 200
FAMILY = "trencadis_torch_expert_tokens"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.epilog = "Example: curl -s localhost:8000/metrics | trencadis expert-loads -o loads.json"
    parser.add_argument("page", nargs="?", metavar="FILE", help="a page of metrics (default: standard input)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to (default: standard output)")


def read_page(text: str) -> dict[str, list[int]]:
    """Return the token count of each expert, by layer, from a page of metrics. Pure.

    Args:
        text: Page of metrics in Prometheus' text format.

    Raises:
        ConfigValueError: The page has no such counts, or they have gaps.
    """
    found: dict[int, dict[int, int]] = {}
    try:
        families = [one for one in text_string_to_metric_families(text) if one.name == FAMILY]
    except ValueError as error:
        raise ConfigValueError(
            f"that is no page of metrics: {cut(str(error), _MAX_SHOWN)}.", hint="Give what GET /metrics answers."
        ) from error
    for sample in (sample for family in families for sample in family.samples if sample.name == f"{FAMILY}_total"):
        try:
            layer = found.setdefault(int(sample.labels["layer"]), {})
            layer[int(sample.labels["expert"])] = int(sample.value)
        except (KeyError, OverflowError, ValueError) as error:
            raise ConfigValueError(f"a sample of {FAMILY} is no number of tokens: {error}.") from error
    if not found:
        raise ConfigValueError(
            f"the page has no {FAMILY}_total.",
            hint="They are counted by the backend torch with [parallel] expert above 1.",
        )
    for number, layer in found.items():
        if sorted(layer) != list(range(len(layer))):
            raise ConfigValueError(
                f"layer {number} of the page has tokens of experts {sorted(layer)}, which are not all."
            )
    return {str(number): [found[number][expert] for expert in sorted(found[number])] for number in sorted(found)}


def run_alone(args: argparse.Namespace, flags: Sequence[str]) -> int:
    """Write the file; returns 0.

    Raises:
        ConfigValueError: The page cannot be read, or has no such counts.
    """
    try:
        text = sys.stdin.read() if args.page is None else read_text(args.page)
    except (OSError, ValueError) as error:
        raise ConfigValueError(f"{args.page}: it cannot be read: {error}.") from error
    try:
        found = read_page(text)
    except ConfigValueError as error:
        raise ConfigValueError(
            f"{args.page or 'standard input'}: {str(error).removesuffix(error.hint).strip()}", hint=error.hint
        ) from error
    lines = ",\n".join(f"  {json.dumps(layer)}: {json.dumps(loads)}" for layer, loads in found.items())
    page = f"{{\n{lines}\n}}\n"
    if args.output is None:
        sys.stdout.write(page)
    else:
        args.output.write_text(page)
    return 0
