"""Divides collected tests into tiers: `pytest`, `.ci/run`, and `pytest -m nightly`, which runs all that `.ci/run` leaves out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import attrs
import pytest
from hypothesis import settings

__all__ = ["CI", "DEFAULT", "FEW", "Tier", "is_of_hypothesis", "mark_nightly", "mark_repeats", "try_fewer_examples"]

FEW = 2
"""So many parameter sets of a test are in each tier, unless the test says another number."""


@attrs.frozen(kw_only=True)
class Tier:
    """How much of what repeats a proof a tier has.

    Attributes:
        marker: Marks what it leaves out.
        every_nth_suite: A test of a conformance suite of the kit runs for one in so many of the components under test.
        share_of_examples: Hypothesis tries one in so many of a test's examples, and ``fewest_examples`` at least.
        fewest_examples: See there.
    """

    marker: str
    every_nth_suite: int
    share_of_examples: int
    fewest_examples: int

    def kept(self, item: pytest.Function) -> int:
        """Return how many of the parameter sets that are marked as this one is are in the tier."""
        mark = item.get_closest_marker("representatives")
        if mark is None:
            return FEW
        in_default: int = mark.args[0]
        return in_default if self is DEFAULT else max(in_default, mark.kwargs.get("ci", in_default))


DEFAULT = Tier(marker="slow", every_nth_suite=12, share_of_examples=8, fewest_examples=5)
"""What `pytest` runs."""
CI = Tier(marker="nightly", every_nth_suite=12, share_of_examples=5, fewest_examples=8)
"""What `.ci/run` runs."""

_LONG_HISTORIES = "test_any_of_many_long_histories_keeps_the_invariants"
"""Test of the scheduling suite that runs at night alone, of every policy."""


def mark_nightly(items: Sequence[pytest.Function]) -> None:
    """Mark what runs at night alone, and mark it ``slow`` as well."""
    for item in items:
        if item.originalname == _LONG_HISTORIES:
            item.add_marker(CI.marker)
    mark_repeats(items, CI)
    for item in items:
        if item.get_closest_marker(CI.marker):
            item.add_marker(DEFAULT.marker)


def mark_repeats(items: Sequence[pytest.Function], tier: Tier = DEFAULT) -> None:
    """Mark all but the representatives of parametrised tests and of conformance suites.

    Of a test's parameter sets evenly spread ones stay. A suite's tests take turns: each component keeps some of them, and each
    test is kept by some components.
    """
    families: defaultdict[tuple[object, str, int], list[pytest.Function]] = defaultdict(list)
    suites: defaultdict[object, dict[object, list[pytest.Function]]] = defaultdict(dict)
    for item in items:
        if item.get_closest_marker(tier.marker):
            continue
        if item.function.__module__.startswith("trencadis_testing."):
            suites[item.function].setdefault(item.parent, []).append(item)
        else:
            families[item.parent, item.originalname, tier.kept(item)].append(item)
    repeats = []
    for (*_, kept), members in families.items():
        repeats += _repeats(members, kept)
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


def is_of_hypothesis(item: pytest.Function) -> bool:
    """Whether hypothesis draws the examples of a test."""
    return hasattr(item.function, "_hypothesis_state_machine_class") or getattr(
        item.function, "is_hypothesis_test", False
    )


def try_fewer_examples(items: Sequence[pytest.Function], tier: Tier) -> None:
    """Scale the number of examples of each test of hypothesis, and try the same ones in every run: at night there are new ones.

    Settings stand at a test's function or, for state machines, at its class.
    """
    holders = {}
    for item in filter(is_of_hypothesis, items):
        if hasattr(item.function, "_hypothesis_state_machine_class"):
            holders[item.cls] = "settings"
        else:
            holders[item.function] = "_hypothesis_internal_use_settings"
    for holder, name in holders.items():
        full = getattr(holder, name)
        fewest = min(tier.fewest_examples, full.max_examples)
        examples = max(fewest, full.max_examples // tier.share_of_examples)
        setattr(holder, name, settings(full, max_examples=examples, derandomize=True, database=None))
