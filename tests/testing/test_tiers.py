from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from support.tiers import CI, DEFAULT, FEW, mark_nightly, mark_repeats, try_fewer_examples


class Item:
    """A collected test."""

    def __init__(self, number: int, function: Any, *marks: Any, parent: object = None) -> None:
        self.number, self.function, self.parent, self.originalname = number, function, parent, "test"
        self._marks = {mark.name: mark for mark in marks}
        self.cls: type[Any] | None = None

    @property
    def is_slow(self) -> bool:
        return "slow" in self._marks

    def get_closest_marker(self, name: str) -> Any:
        return self._marks.get(name)

    def add_marker(self, mark: Any) -> None:
        made = getattr(pytest.mark, mark) if isinstance(mark, str) else mark
        self._marks[made.name] = made


def mark(items: list[Item]) -> list[int]:
    """Return which are in the default tier."""
    mark_repeats(items)  # type: ignore[arg-type]
    return [item.number for item in items if not item.is_slow]


@pytest.mark.parametrize(
    ("kept", "total", "stay"), [(1, 5, [0]), (2, 5, [0, 4]), (3, 5, [0, 2, 4]), (3, 2, [0, 1]), (9, 4, [0, 1, 2, 3])]
)
def test_representatives_are_spread_evenly(kept: int, total: int, stay: list[int]) -> None:
    assert mark([Item(number, len, pytest.mark.representatives(kept)) for number in range(total)]) == stay


def test_without_a_mark_a_few_parameter_sets_stay() -> None:
    assert len(mark([Item(number, len) for number in range(100)])) == FEW


def test_what_is_slow_anyway_is_no_representative() -> None:
    representatives = pytest.mark.representatives(1)
    assert mark([Item(0, len, representatives, pytest.mark.slow), Item(1, len, representatives), Item(2, len)]) == [
        1,
        2,
    ]


def test_what_is_for_the_night_is_slow_and_no_representative() -> None:
    items = [Item(0, len, pytest.mark.nightly), *(Item(number, len) for number in range(1, 3))]
    mark_nightly(items)  # type: ignore[arg-type]
    assert mark(items) == [1, 2]


def test_of_a_long_test_some_parameter_sets_are_kept_and_the_others_are_nightly() -> None:
    items = [Item(number, len, pytest.mark.representatives(1, ci=2)) for number in range(5)]
    mark_nightly(items)  # type: ignore[arg-type]
    assert [item.number for item in items if not item.get_closest_marker("nightly")] == [0, 4]
    assert mark(items) == [0]


def test_ci_keeps_at_least_the_representatives() -> None:
    items = [Item(number, len, pytest.mark.representatives(7)) for number in range(20)]
    mark_nightly(items)  # type: ignore[arg-type]
    assert len([item for item in items if not item.get_closest_marker("nightly")]) == 7
    assert len(mark(items)) == 7


@pytest.mark.parametrize("total", [1, FEW, FEW + 1, 100])
def test_without_a_mark_a_few_parameter_sets_are_in_ci_and_all_in_one_of_two_tiers(total: int) -> None:
    items = [Item(number, len) for number in range(total)]
    mark_nightly(items)  # type: ignore[arg-type]
    assert len([item for item in items if not item.get_closest_marker(CI.marker)]) == min(total, FEW)
    assert len(mark(items)) == min(total, FEW)


def test_the_long_histories_of_every_policy_are_nightly_and_the_other_tests_take_turns() -> None:
    test = _test_of_a_suite()
    items = [Item(number, test, parent=number) for number in range(3)]
    items[1].originalname = "test_any_of_many_long_histories_keeps_the_invariants"
    mark_nightly(items)  # type: ignore[arg-type]
    assert [bool(item.get_closest_marker(CI.marker)) for item in items] == [False, True, True]


def _test_of_a_suite() -> Any:
    def test() -> None: ...

    test.__module__ = "trencadis_testing.eviction"
    return test


@pytest.mark.parametrize("num_components", [1, 2, 4, 7, 13])
def test_components_take_turns_in_the_tests_of_a_suite(num_components: int) -> None:
    tests = [_test_of_a_suite() for _ in range(DEFAULT.every_nth_suite)]
    items = [Item(0, test, parent=number) for number in range(num_components) for test in tests]
    mark(items)
    ran = [item for item in items if not item.is_slow]
    assert {item.function for item in ran} == set(tests)
    assert {item.parent for item in ran} == set(range(num_components))
    assert len(ran) <= len(tests) * -(-num_components // min(DEFAULT.every_nth_suite, num_components))


def test_a_share_of_the_examples_is_tried_and_a_few_at_least() -> None:
    @given(st.integers())
    @settings(max_examples=80)
    def many(number: int) -> None: ...

    @given(st.integers())
    @settings(max_examples=3)
    def few(number: int) -> None: ...

    class Machine(RuleBasedStateMachine):
        @rule()
        def go(self) -> None: ...

    case = Machine.TestCase
    case.settings = settings(max_examples=40)
    state_machine = Item(0, case.runTest)
    state_machine.cls = case
    try_fewer_examples([Item(0, many), Item(1, many), Item(0, few), state_machine], DEFAULT)  # type: ignore[list-item]
    assert many._hypothesis_internal_use_settings.max_examples == 80 // DEFAULT.share_of_examples
    assert few._hypothesis_internal_use_settings.max_examples == 3
    assert case.settings.max_examples == max(DEFAULT.fewest_examples, 40 // DEFAULT.share_of_examples)
    assert many._hypothesis_internal_use_settings.derandomize
    assert case.settings.derandomize
