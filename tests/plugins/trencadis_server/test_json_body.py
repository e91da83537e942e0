from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from trencadis.clock import SystemClock
from trencadis_server.config import ServerConfig
from trencadis_server.context import ServerContext
from trencadis_server.errors import ApiError
from trencadis_server.protocol.chat import ChatRequest
from trencadis_server.protocol.json_body import ValueCheck, decode, read_body

_ATOMS = st.none() | st.integers() | st.text(alphabet='[{]}"\\,x\n', max_size=60)
_VALUES = st.recursive(_ATOMS, lambda inner: st.lists(inner) | st.dictionaries(st.text('[{"\\'), inner), max_leaves=40)


def is_refused(body: bytes, **limits: int) -> bool:
    try:
        asyncio.run(ValueCheck(**limits).check(body))
    except ApiError as error:
        return (error.status, error.code) == (400, "too_many_values") and any(
            str(one) in error.message for one in limits.values()
        )
    return False


def limits_of(value: object) -> tuple[int, int, int]:
    """Containers, keys and values of JSON."""
    if isinstance(value, dict):
        inner = [limits_of(one) for one in value.values()]
        own = (1, len(value), 1 + max(0, len(value) - 1))
    elif isinstance(value, list):
        inner = [limits_of(one) for one in value]
        own = (1, 0, 1 + max(0, len(value) - 1))
    else:
        return (0, 0, 0)
    containers, keys, values = (sum(column) for column in zip(own, *inner, strict=True))
    return containers, keys, values


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(_VALUES)
def test_lists_objects_keys_and_values_are_counted_exactly_and_brackets_in_text_are_not(value: object) -> None:
    for ascii_only in (True, False):
        body = json.dumps(value, ensure_ascii=ascii_only).encode() + b" " * 200
        for exact, name in zip(limits_of(value), ("max_containers", "max_keys", "max_values"), strict=True):
            limits = {"max_values": 10**6, "max_keys": 100, "max_containers": 100}
            for limit in (exact - 1, exact):
                if limit >= 0:
                    assert is_refused(body, **{**limits, name: limit}) == (limit < exact)


@pytest.mark.parametrize("body", [b"[" * 21, b"{" * 11 + b"[" * 10, b'"\\"' + b'"' + b"[" * 21])
def test_what_is_no_json_is_counted_as_well(body: bytes) -> None:
    assert is_refused(body, max_containers=20)


@pytest.mark.parametrize(
    "body", [b'"' + b"[" * 99, b'"' + b"[" * 99 + b"\\", b'"' + b'\\"[' * 99, b"[" * 20 + b" " * 9]
)
def test_a_text_without_end_is_a_text(body: bytes) -> None:
    assert not is_refused(body, max_containers=20)


def test_strings_without_anything_between_are_not_counted_for_ever() -> None:
    body = b'""' * 10_000 + b"[" * 9 + b"," * 101
    assert is_refused(body, max_values=100, max_keys=10, max_containers=10)


@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    "body",
    [b'{"z":[' + b"[]," * 5_000_000 + b"0]}", b'{"z":"' + b'\\"[' * 5_000_000, b'"",' * 500_000 + b"[" * 70_000],
)
def test_the_event_loop_goes_on_while_a_large_body_is_checked(body: bytes) -> None:
    async def largest_gap_s() -> float:
        check = asyncio.create_task(ValueCheck().check(body))
        gap_s, last_s = 0.0, time.process_time()
        while not check.done():
            await asyncio.sleep(0)
            now_s = time.process_time()
            gap_s, last_s = max(gap_s, now_s - last_s), now_s
        await asyncio.gather(check, return_exceptions=True)
        return gap_s

    assert asyncio.run(largest_gap_s()) < 1.5  # CPU seconds; parsing the first takes three and cannot be interrupted


@given(_VALUES)
def test_what_is_sound_is_decoded_as_json_says(value: object) -> None:
    for ascii_only in (True, False):
        assert decode(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b'{"a": ' + b"9" * 5000 + b"}", None, "too many digits"),
        (b'{"a": ' + b"[" * 100_000, "a", "nested more than 32 levels"),
        (b"[" * 100_000, None, "nested more than 32 levels"),
        (b'{"a": "' + b"x" * 2**20 + b"}", None, "not valid JSON"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_what_cannot_be_is_refused_with_its_place(body: bytes, param: str | None, words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        decode(body)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert len(caught.value.message) < 300


def test_in_a_field_without_an_effect_it_has_none() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "metadata": {"a": 10**30}}
    assert read_body(json.dumps(body).encode(), ChatRequest).model == "m"


@pytest.mark.parametrize(
    "bad",
    [
        {"messages": [{}] * 16384},
        {"messages": [{"role": "user"}] * 16384},
        {"messages": [{"role": "user", "content": [1] * 5000}]},
        {"messages": [{"role": "user", "content": "x", "tool_calls": [1] * 5000}]},
        {"logit_bias": {f"x{i}": 1 for i in range(16384)}},
        {"logit_bias": {str(i): "x" for i in range(16384)}},
        {"allowed_token_ids": ["x"] * 16384},
        {"bad_words": [""] * 1000},
        {"guided_choice": [1] * 1000},
    ],
    ids=lambda bad: str(bad)[:30],
)
def test_one_fault_of_many_is_enough(bad: dict[str, object]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **bad}
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate(body)
    assert caught.value.error_count() <= 3  # one for each type that a field may have


def test_a_large_body_is_parsed_on_a_thread_and_a_small_one_at_once() -> None:
    parser = ServerContext(
        None,  # type: ignore[arg-type]
        config=ServerConfig(), model_names=("m",), admission=None, clock=SystemClock(), created=0,  # type: ignore[arg-type]
    ).parser  # fmt: skip
    for num_bytes, is_inline in ((16_384, True), (16_385, False)):
        thread = asyncio.run(parser.run(threading.get_ident, num_characters=num_bytes))
        assert (thread == threading.get_ident()) == is_inline
