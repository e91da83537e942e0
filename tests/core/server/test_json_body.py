from __future__ import annotations

import asyncio
import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trencadis.server.errors import ApiError
from trencadis.server.json_body import ValueCheck

LIMIT = 20
_ATOMS = st.none() | st.integers() | st.text(alphabet='[{]}"\\,x\n', max_size=60)
_VALUES = st.recursive(_ATOMS, lambda inner: st.lists(inner) | st.dictionaries(st.text('[{"\\'), inner), max_leaves=40)


def is_refused(body: bytes, limit: int = LIMIT) -> bool:
    try:
        asyncio.run(ValueCheck(max_containers=limit).check(body))
    except ApiError as error:
        return (error.status, error.code) == (400, "too_many_values") and str(limit) in error.message
    return False


def num_containers(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(num_containers, value.values()))
    return 1 + sum(map(num_containers, value)) if isinstance(value, list) else 0


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_VALUES)
def test_lists_and_objects_are_counted_and_brackets_in_text_are_not(value: object) -> None:
    for ascii_only in (True, False):
        body = json.dumps(value, ensure_ascii=ascii_only).encode() + b" " * (LIMIT + 1)
        assert is_refused(body) == (num_containers(value) > LIMIT)


@pytest.mark.parametrize("body", [b"[" * 21, b"{" * 11 + b"[" * 10, b'"\\"' + b'"' + b"[" * 21])
def test_what_is_no_json_is_counted_as_well(body: bytes) -> None:
    assert is_refused(body)


@pytest.mark.parametrize(
    "body", [b'"' + b"[" * 99, b'"' + b"[" * 99 + b"\\", b'"' + b'\\"[' * 99, b"[" * 20 + b" " * 9]
)
def test_a_text_without_end_is_a_text(body: bytes) -> None:
    assert not is_refused(body)


@pytest.mark.parametrize(
    "body",
    [b'{"z":[' + b"[]," * 5_000_000 + b"0]}", b'{"z":"' + b'\\"[' * 5_000_000, b'"",' * 500_000 + b"[" * 70_000],
)
def test_the_event_loop_goes_on_while_a_large_body_is_checked(body: bytes) -> None:
    async def largest_gap_s() -> float:
        check = asyncio.create_task(ValueCheck().check(body))
        gap_s, last_s = 0.0, time.perf_counter()
        while not check.done():
            await asyncio.sleep(0)
            now_s = time.perf_counter()
            gap_s, last_s = max(gap_s, now_s - last_s), now_s
        await asyncio.gather(check, return_exceptions=True)
        return gap_s

    assert asyncio.run(largest_gap_s()) < 1.5  # parsing the first takes three seconds and cannot be interrupted
