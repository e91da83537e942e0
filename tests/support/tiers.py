"""Divides collected tests into three tiers: `pytest`, `.ci/run`, and a release, which alone runs everything."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import attrs
import pytest
from hypothesis import settings

__all__ = ["CI", "DEFAULT", "Tier", "mark_release", "mark_repeats", "try_fewer_examples"]


@attrs.frozen(kw_only=True)
class Tier:
    """How much of what repeats a proof a tier has.

    Attributes:
        marker: Of what it leaves out.
        kept_by: Marker with which a test says how many of its parameter sets the tier has.
        most_whole: For tests that do not say it: the tier has all parameter sets of a test with at most so many.
        kept_of_more: And so many of one with more.
        every_nth_suite: A test of a conformance suite of the kit runs for one in so many of the components under test.
        share_of_examples: Hypothesis tries one in so many of a test's examples, and ``fewest_examples`` at least.
        fewest_examples: See there.
    """

    marker: str
    kept_by: str
    most_whole: int
    kept_of_more: int
    every_nth_suite: int
    share_of_examples: int
    fewest_examples: int


DEFAULT = Tier(
    marker="slow",
    kept_by="representatives",
    most_whole=2,
    kept_of_more=2,
    every_nth_suite=12,
    share_of_examples=8,
    fewest_examples=5,
)
"""What `pytest` runs."""
CI = Tier(
    marker="release",
    kept_by="kept_in_ci",
    most_whole=2,
    kept_of_more=2,
    every_nth_suite=8,
    share_of_examples=4,
    fewest_examples=10,
)
"""What `.ci/run` runs."""

_WITH_AN_OPTION = "test_any_of_many_long_histories_keeps_the_invariants"
"""A suite's test that `--trencadis-all-histories` alone runs: with it, of every policy."""


def mark_release(items: Sequence[pytest.Function]) -> None:
    """Mark what only a release runs, and mark it ``slow`` as well."""
    mark_repeats(items, CI)
    for item in items:
        if item.get_closest_marker(CI.marker):
            item.add_marker(pytest.mark.slow)


def mark_repeats(items: Sequence[pytest.Function], tier: Tier = DEFAULT) -> None:
    """Mark all but the representatives of parametrised tests and of conformance suites.

    Of a test's parameter sets evenly spread ones stay. A suite's tests take turns: each component keeps some of them, and each
    test is kept by some components.
    """
    families: defaultdict[tuple[object, str, int | None], list[pytest.Function]] = defaultdict(list)
    suites: defaultdict[object, dict[object, list[pytest.Function]]] = defaultdict(dict)
    for item in items:
        if item.get_closest_marker(tier.marker):
            continue
        if item.originalname == _WITH_AN_OPTION:
            continue
        if item.function.__module__.startswith("trencadis_testing."):
            suites[item.function].setdefault(item.parent, []).append(item)
        else:
            # A tier has at least as many as each smaller one.
            marks = [item.get_closest_marker(name) for name in {tier.kept_by, DEFAULT.kept_by}]
            kept = max((mark.args[0] for mark in marks if mark), default=None)
            families[item.parent, item.originalname, kept].append(item)
    repeats = []
    for (*_, kept), members in families.items():
        few = tier.most_whole if len(members) <= tier.most_whole else tier.kept_of_more
        repeats += _repeats(members, few if kept is None else kept)
    for turn, components in enumerate(suites.values()):
        every = min(tier.every_nth_suite, len(components))
        repeats += [one for number, own in enumerate(components.values()) if (number - turn) % every for one in own]
    for item in repeats:
        item.add_marker(tier.marker)


def _repeats(members: Sequence[pytest.Function], kept: int) -> list[pytest.Function]:
    """Return all but some, evenly spread."""
    distance = max(1.0, (len(members) - 1) / max(1, kept - 1))
    stay = {round(number * distance) for number in range(kept)}
    return [member for number, member in enumerate(members) if number not in stay]


def try_fewer_examples(items: Sequence[pytest.Function], tier: Tier) -> None:
    """Scale the number of examples of each test of hypothesis, and try the same ones in every run: a release looks for new ones.

    Settings stand at a test's function or, for state machines, at its class.
    """
    holders = {}
    for item in items:
        if hasattr(item.function, "_hypothesis_state_machine_class"):
            holders[item.cls] = "settings"
        elif getattr(item.function, "is_hypothesis_test", False):
            holders[item.function] = "_hypothesis_internal_use_settings"
    for holder, name in holders.items():
        full = getattr(holder, name)
        fewest = min(tier.fewest_examples, full.max_examples)
        examples = max(fewest, full.max_examples // tier.share_of_examples)
        setattr(holder, name, settings(full, max_examples=examples, derandomize=True, database=None))
