"""Bounds of a flight record: a received file may say anything, so that it is checked before anything is allocated for it.

Types bound single values, and are checked while a file is decoded. :func:`check_flight_record` checks what lies between values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from msgspec import Meta

if TYPE_CHECKING:
    from trencadis.records.flight_record import FlightRecord, RecordedRequest

__all__: list[str] = []  # for flight_record.py alone

MAX_BYTES = 128 * 2**20
"""Of a record that is no longer compressed."""

_ARRAYS = ("slots", "starts", "counts", "num_drafts")
"""Fields of an event that hold a number for each sequence of a plan."""

_MAX_TOKENS = 2**26
"""Of all requests together: a replay holds four bytes for each."""

_MAX_BLOCKS = 2**24

MAX_CHANGE_BYTES = 2**16
"""Of the table of a change."""

Number = Annotated[int, Meta(ge=-(2**31), le=2**31)]
Count = Annotated[int, Meta(ge=0, le=2**31)]
Size = Annotated[int, Meta(ge=1, le=2**31)]
Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]
Ratio = Annotated[float, Meta(gt=0, le=1e12)]
Target = Annotated[float, Meta(ge=0)]
Text = Annotated[str, Meta(max_length=2**16)]
Bytes = Annotated[bytes, Meta(max_length=2**22)]
Numbers = Annotated[tuple[int, ...], Meta(max_length=2**16)]


def check_flight_record(record: FlightRecord) -> None:
    """Refuse a record whose parts do not fit each other. Pure.

    Raises:
        ValueError: They do not; says which.
    """
    if record.num_blocks > _MAX_BLOCKS:
        raise ValueError(f"it says {record.num_blocks:,} blocks, more than {_MAX_BLOCKS:,}")
    _check_requests(record.requests)
    for number, event in enumerate(record.events):
        _check_event(record, event, f"event {number}")


def _check_requests(requests: Sequence[RecordedRequest]) -> None:
    num_tokens = 0
    for number, one in enumerate(requests):
        where = f"request {number}"
        if one.number != number:
            raise ValueError(f"{where} has the number {one.number}")
        num_tokens += max(one.num_tokens, one.num_prompt_tokens, one.num_known_tokens)
        if num_tokens > _MAX_TOKENS:
            raise ValueError(f"its requests have more than {_MAX_TOKENS:,} tokens")
        if not one.num_like:
            continue
        if not 0 <= one.like < len(requests):
            raise ValueError(f"{where} begins like request {one.like}, which is not there")
        if one.num_like > min(one.num_tokens, requests[one.like].num_tokens):
            raise ValueError(f"{where} shares {one.num_like} tokens with request {one.like}, more than there are")
    _check_order(requests)


def _check_order(requests: Sequence[RecordedRequest]) -> None:
    """Refuse requests each of which begins like the next one, in a circle."""
    done = [not one.num_like for one in requests]
    for start in range(len(requests)):
        chain, number = [], start
        while not done[number]:
            done[number] = True
            chain.append(number)
            number = requests[number].like
        if chain and number in chain:
            raise ValueError(f"request {number} begins like itself, by way of others")


def _check_event(record: FlightRecord, event: Any, where: str) -> None:
    number = getattr(event, "number", None)
    if number is not None and number >= len(record.requests):
        raise ValueError(f"{where} is about request {number}, which is not there")
    lengths = {name: len(getattr(event, name)) for name in _ARRAYS if hasattr(event, name)}
    if any(length % 4 for length in lengths.values()):
        raise ValueError(f"{where} has numbers of another length than four bytes")
    if len({length for name, length in lengths.items() if length or name != "num_drafts"}) > 1:
        raise ValueError(f"{where} says something else of as many sequences as are in it")
    emitted = getattr(event, "num_emitted", b"")
    if emitted:
        counts = np.frombuffer(emitted, "<i4")
        if counts.min() < 0 or counts.max() > record.max_draft_tokens + 1:
            raise ValueError(f"{where} emits more tokens than there are drafts and one more")
