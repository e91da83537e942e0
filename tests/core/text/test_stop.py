from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.text.stop import StopChecker

LETTERS = st.text(alphabet="ab", max_size=40)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=4)


def first_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The definition: the stop string that is complete first; of two, the longer one. Returns its end, too."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end, max(complete, key=len)
    return None


def cut(text: str, data: st.DataObject) -> list[str]:
    pieces = []
    while text:
        size = data.draw(st.integers(0, len(text)))
        pieces.append(text[:size])
        text = text[size:] if size else text
        if not size and len(pieces) > 60:
            pieces.append(text)
            break
    return pieces


@given(text=LETTERS, stops=STOPS, include=st.booleans(), data=st.data())
def test_any_cut_of_the_text_ends_where_the_definition_says(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    checker = StopChecker(stops, include=include)
    passed = "".join(checker.feed(piece) for piece in cut(text, data)) + checker.flush()
    match = first_match(text, stops)
    if match is None:
        assert checker.matched is None
        assert passed == text
    else:
        end, stop = match
        assert checker.matched == stop
        assert passed == text[: end if include else end - len(stop)]


@given(text=LETTERS, stops=STOPS)
def test_exactly_the_longest_suffix_that_could_begin_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    checker = StopChecker(stops)
    passed = ""
    for end, letter in enumerate(text, start=1):
        passed += checker.feed(letter)
        if checker.matched is not None:
            return
        begun = [size for stop in stops for size in range(len(stop)) if text[:end].endswith(stop[:size])]
        assert passed == text[: end - max(begun)]


@pytest.mark.parametrize("stops", [["b", "ab"], ["ab", "b"]])
def test_of_two_that_end_together_the_longer_wins(stops: list[str]) -> None:
    checker = StopChecker(stops)
    assert (checker.feed("xab"), checker.matched) == ("x", "ab")


def test_nothing_passes_after_a_match() -> None:
    checker = StopChecker(["."])
    assert checker.feed("a.b") == "a"
    assert checker.feed("c") == ""
    assert checker.flush() == ""


def test_a_long_repetitive_stop_string_costs_linear_time() -> None:
    comparisons = 0

    class Counted(str):
        __slots__ = ()

        def __getitem__(self, index: object) -> str:
            nonlocal comparisons
            comparisons += 1
            return str.__getitem__(self, index)  # type: ignore[index]

    checker = StopChecker([Counted("a" * 2000 + "b")])
    comparisons = 0
    for _ in range(20):
        checker.feed("a" * 500)
    assert comparisons <= 5 * 10_000
