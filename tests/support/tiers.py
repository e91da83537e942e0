"""Divides collected tests into the default tier and the slow one, a part of which is for a release."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import settings

__all__ = [
    "EVERY_NTH_SUITE",
    "FEWEST_EXAMPLES",
    "MOST_PARAMETER_SETS",
    "SHARE_OF_EXAMPLES",
    "mark_repeats",
    "mark_release",
    "try_fewer_examples",
]

MOST_PARAMETER_SETS = 2
"""In the default tier, a test that says nothing else has so many of its parameter sets."""
EVERY_NTH_SUITE = 12
"""In the default tier, a test of a conformance suite of the kit runs for one in so many of the components under test."""
SHARE_OF_EXAMPLES = 8
"""In the default tier, hypothesis tries one in so many of a test's examples, and :data:`FEWEST_EXAMPLES` at least."""
FEWEST_EXAMPLES = 5


def mark_release(items: Sequence[pytest.Function]) -> None:
    """Mark ``slow`` what is for a release: tests with that marker, and all but n parameter sets of ``@pytest.mark.kept_in_ci(n)``."""
    families: defaultdict[tuple[object, ...], list[pytest.Function]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("kept_in_ci")
        if mark:
            families[item.parent, item.originalname, mark.args[0]].append(item)
    for (*_, kept), members in families.items():
        for item in _repeats(members, kept):
            item.add_marker(pytest.mark.release)
    for item in items:
        if item.get_closest_marker("release"):
            item.add_marker(pytest.mark.slow)


def mark_repeats(items: Sequence[pytest.Function]) -> None:
    """Mark all but the representatives of parametrised tests and of conformance suites ``slow``.

    Of the parameter sets of a test, :data:`MOST_PARAMETER_SETS` evenly spread ones stay, or as many as
    ``@pytest.mark.representatives(n)`` says. A suite's tests take turns:
    each component keeps one in :data:`EVERY_NTH_SUITE` of them, and each test is kept by one in as many components.
    """
    families: defaultdict[tuple[object, ...], list[pytest.Function]] = defaultdict(list)
    suites: defaultdict[object, dict[object, list[pytest.Function]]] = defaultdict(dict)
    for item in items:
        if item.get_closest_marker("slow"):
            continue
        if item.function.__module__.startswith("trencadis_testing."):
            suites[item.function].setdefault(item.parent, []).append(item)
        else:
            mark = item.get_closest_marker("representatives")
            kept = mark.args[0] if mark else MOST_PARAMETER_SETS
            families[item.parent, item.originalname, kept].append(item)
    repeats = []
    for (*_, kept), members in families.items():
        repeats += _repeats(members, kept)
    for turn, components in enumerate(suites.values()):
        every = min(EVERY_NTH_SUITE, len(components))
        repeats += [one for number, own in enumerate(components.values()) if (number - turn) % every for one in own]
    for item in repeats:
        item.add_marker(pytest.mark.slow)


def _repeats(members: Sequence[pytest.Function], kept: int) -> list[pytest.Function]:
    """Return all but some, evenly spread."""
    distance = max(1.0, (len(members) - 1) / max(1, kept - 1))
    stay = {round(number * distance) for number in range(kept)}
    return [member for number, member in enumerate(members) if number not in stay]


def try_fewer_examples(items: Sequence[pytest.Function]) -> None:
    """Scale the number of examples of each test of hypothesis, which has it at its function or, for state machines, at its class."""
    holders = {}
    for item in items:
        if hasattr(item.function, "_hypothesis_state_machine_class"):
            holders[item.cls] = "settings"
        elif getattr(item.function, "is_hypothesis_test", False):
            holders[item.function] = "_hypothesis_internal_use_settings"
    for holder, name in holders.items():
        full = getattr(holder, name)
        fewest = min(FEWEST_EXAMPLES, full.max_examples)
        setattr(holder, name, settings(full, max_examples=max(fewest, full.max_examples // SHARE_OF_EXAMPLES)))
