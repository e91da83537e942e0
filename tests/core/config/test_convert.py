from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Optional

import pytest

from trencadis.config.convert import WrongValueError, describe_type, parse_text, structure


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Size(enum.Enum):
    SMALL = 1


@pytest.mark.representatives(100)
@pytest.mark.parametrize(
    ("kind", "value", "typed"),
    [
        (int, 3, 3),
        (float, 3, 3.0),
        (float, 2.5, 2.5),
        (bool, True, True),
        (str, "x", "x"),
        (Path, "a/b", Path("a/b")),
        (tuple[str, ...], ["a", "b"], ("a", "b")),
        (tuple[int, str], [1, "b"], (1, "b")),
        (list[int], (1, 2), [1, 2]),
        (frozenset[str], ["a", "a"], frozenset({"a"})),
        (tuple[tuple[int, ...], ...], [[1], [2, 3]], ((1,), (2, 3))),
        (Mapping[str, float], {"a": 1}, {"a": 1.0}),
        (dict[str, int], {}, {}),
        (int | None, None, None),
        (Optional[int], 3, 3),  # noqa: UP045 - the older spelling is allowed too
        (int | str, "x", "x"),
        (Literal["a", 2], 2, 2),
        (Colour, "red", Colour.RED),
        (Colour, Colour.BLUE, Colour.BLUE),
    ],
)
def test_a_fitting_value_is_taken(kind, value, typed):
    found = structure(kind, value)
    assert found == typed
    assert type(found) is type(typed)


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        (int, True, "must be a whole number."),
        (int, 3.0, "must be a whole number."),
        (int, "3", "must be a whole number."),
        (float, "hot", "must be a number."),
        (float, False, "must be a number."),
        (bool, 1, "must be true or false."),
        (bool, "true", "must be true or false."),
        (str, 3, "must be text."),
        (Path, 3, "must be a path."),
        (tuple[str, ...], "abc", "must be a list of text."),
        (tuple[str, ...], ["a", 3], "each element must be text."),
        (tuple[int, int], [1], "must have 2 elements."),
        (int | None, "x", "must be a whole number."),
        (int | str, [], "must be a whole number or text."),
        (dict[str, int], [1], "must be a table."),
        (Literal["fast", "slow"], "fst", 'did you mean "fast"? It must be one of: fast, slow.'),
        (Colour, "bleu", 'did you mean "blue"? It must be one of: red, blue.'),
        (Literal[1], True, "must be one of: 1."),
        (Size, True, "must be one of: 1."),
    ],
)
def test_another_value_is_refused_in_words(kind, value, reason):
    with pytest.raises(WrongValueError) as caught:
        structure(kind, value)
    assert str(caught.value) == reason


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (int, "12", 12),
        (int, "1_000", 1000),
        (int, "-3", -3),
        (int, "hot", "hot"),
        (float, "1e-3", 1e-3),
        (bool, "true", True),
        (bool, "False", False),
        (bool, "yes", "yes"),
        (str, "12", "12"),
        (str, "", ""),
        (Path, "a", "a"),
        (tuple[str, ...], "log, prometheus", ("log", "prometheus")),
        (tuple[str, ...], "", ()),
        (tuple[int, ...], "1,2", (1, 2)),
        (int | None, "none", None),
        (int | None, "3", 3),
        (int | str, "x", "x"),
        (int | str, "3", 3),
        (int | float, "abc", "abc"),
        (Literal["a", 2], "2", 2),
        (Literal["a", 2], "b", "b"),
        (Colour, "red", "red"),
        (Size, "1", 1),
        (Size, "7", "7"),
        (Mapping[str, float], "{a = 1}", {"a": 1}),
        (tuple[str, ...], '["a,b", "c"]', ["a,b", "c"]),
        (tuple[str, ...], "['a,b']", ["a,b"]),
        (tuple[int, ...], "[1, 2]", [1, 2]),
        (tuple[str, ...], "[]", []),
        (tuple[str, ...], '["a,b", "c', '["a,b", "c'),
        (tuple[str, ...], "[::1]:80,[::2]:80", ("[::1]:80", "[::2]:80")),
        (object, "12", 12),
        (object, "plain text", "plain text"),
    ],
)
def test_text_means_what_the_type_says(kind, text, value):
    found = parse_text(kind, text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (int, "a whole number"),
        (tuple[str, ...], "a list of text"),
        (list[int], "a list of whole number"),
        (tuple, "a list"),
        (dict[str, int], "a table"),
        (Literal["a", "b"], "one of: a, b"),
        (Colour, "one of: red, blue"),
        (float | None, "a number or none"),
        (complex, "complex"),
    ],
)
def test_a_type_is_said_in_words(kind, words):
    assert describe_type(kind) == words


def test_a_type_that_no_rule_knows_is_refused_by_its_name():
    with pytest.raises(WrongValueError, match="must be complex"):
        structure(complex, object())
