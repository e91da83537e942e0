from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.errors import InvalidRequestError
from trencadis.records.plain import MAX_DEPTH, check_plain, is_text, plain_fault


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


class CountedStr(str):
    """A key that counts how often it is read as text."""

    num_read = 0

    def __getitem__(self, index: Any) -> str:
        CountedStr.num_read += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("value", "where", "why"),
    [
        (10**30, "", "beyond 64 bits"),
        (2**64, "", "beyond 64 bits"),
        (-(2**63) - 1, "", "beyond 64 bits"),
        ("\ud800", "", "half a surrogate pair at character 0"),
        ([1, "a\ud800"], "[1]", "half a surrogate pair at character 1"),
        ({"x": {"a": [0, 10**30]}}, ".x.a[1]", "beyond 64 bits"),
        ({"x": {"\ud800": 1}}, ".x", "has a key that has half a surrogate pair"),
        ({"x": object()}, ".x", "of the type object"),
        ({"x": {1, 2}}, "", ""),
        (nested(MAX_DEPTH + 2), "[0]" * (MAX_DEPTH + 1), "nested more than 32 levels"),
        (nested(1000), "[0]" * (MAX_DEPTH + 1), "nested more than 32 levels"),
    ],
)
def test_a_value_that_cannot_be_sent_is_refused_with_its_place(value: Any, where: str, why: str) -> None:
    fault = plain_fault(value)
    if not why:  # a set travels as a list
        assert fault is None
        return
    assert fault is not None
    assert fault[0] == where
    assert why in fault[1]
    with pytest.raises(InvalidRequestError) as caught:
        check_plain(value, "field")
    assert caught.value.field == "field"
    assert str(caught.value).startswith(f"field{where} ")
    assert len(str(caught.value)) < 400


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(PLAIN)
def test_what_is_taken_can_be_encoded_and_comes_back(value: Any) -> None:
    assert plain_fault(value) is None
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
    assert repr(back) == repr(value)


def test_the_deepest_value_that_is_taken_is_as_deep_as_the_limit_says() -> None:
    assert plain_fault(nested(MAX_DEPTH + 1)) is None


def test_json_has_neither_infinity_nor_nan_and_msgpack_has() -> None:
    assert plain_fault({"a": [math.inf, math.nan]}) is None
    assert plain_fault({"a": [1.0, math.inf]}, is_json=True) == (".a[1]", "is no finite number")


def test_paths_are_built_for_the_fault_alone() -> None:
    names = [CountedStr(f"k{i}") for i in range(1000)]
    value = {name: [0] for name in names} | {CountedStr("last"): [10**30]}
    assert plain_fault(value, is_json=True) == (".last[0]", "is a whole number beyond 64 bits")
    assert CountedStr.num_read <= 1


def test_text_is_what_utf_8_can_hold() -> None:
    assert is_text("é")
    assert not is_text("\udc00")
    assert not is_text(b"a")
