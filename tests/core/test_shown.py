"""A value of a client or a plugin is shown in bounded time and room, whatever it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trencadis.faults import shown
from trencadis.interfaces import TokenSplit
from trencadis.records import Phase, Shape


class Endless:
    """Never comes to an end when it is printed or walked through."""

    def __repr__(self) -> str:
        raise AssertionError("printed")

    def __iter__(self) -> Any:
        raise AssertionError("walked through")


class EndlessList(list[int]):
    """Says that it is a list."""

    def __repr__(self) -> str:
        raise AssertionError("printed")

    def __iter__(self) -> Any:
        raise AssertionError("walked through")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (1.5, "1.5"),
        ("ab", "'ab'"),
        ([1, [2, [3, [4]]]], "[1, [2, [3, …]]]"),
        (list(range(9)), "[0, 1, 2, 3, 4, 5, 6, 7, … 9 in all]"),
        (range(10**12), "[0, 1, 2, 3, 4, 5, 6, 7, … 1000000000000 in all]"),
        ({"a": (1,)}, "{'a': (1)}"),
        (np.array([1, 2]), "[1, 2]"),
        (np.zeros((2, 3), np.int32), "[0, 0, 0, 0, 0, 0] (shape (2, 3), int32)"),
        (np.int64(7), "7"),
        (10**1000, "<int of 3322 bits>"),
        (Shape(1, 2, 3, Phase.DECODE), "Shape(batch_size=1, query_len=2, num_blocks=3, phase=Phase.DECODE)"),
        (TokenSplit(1, 2), "TokenSplit(decode=1, prefill=2)"),
        (Shape, "Shape"),
        (Path("a") / "b", "'a/b'"),
        (Endless(), "<Endless>"),
        (EndlessList([1]), "<EndlessList>"),
    ],
)
def test_a_value_is_shown_in_few_words(value: object, text: str) -> None:
    assert shown(value) == text


def test_a_value_whose_class_raises_is_named() -> None:
    class Lies:
        @property
        def __class__(self) -> Any:
            raise RuntimeError("no class")

    assert shown(Lies()) == "<Lies>"


def test_a_huge_value_is_neither_walked_through_nor_printed_whole() -> None:
    reads: list[int] = []

    class Counting(np.ndarray[Any, Any]):
        def __getitem__(self, item: Any) -> Any:
            reads.append(1)
            return super().__getitem__(item)

    huge = np.zeros(50_000_000, np.int8).view(Counting)
    for value in (
        huge,
        [0] * 50_000_000,
        "x" * 50_000_000,
        {i: i for i in range(300_000)},
        set(range(300_000)),
        10**5000,
    ):
        assert len(shown(value)) < 400
    assert len(reads) < 50
