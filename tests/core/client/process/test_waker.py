from __future__ import annotations

import select
from collections.abc import Iterator

import pytest

from trencadis.client.process.waker import Waker


@pytest.fixture
def waker() -> Iterator[Waker]:
    made = Waker()
    yield made
    made.close()


def is_awake(waker: Waker) -> bool:
    return bool(select.select([waker], [], [], 0)[0])


def test_it_is_readable_from_wake_to_clear(waker: Waker) -> None:
    assert not is_awake(waker)
    for _ in range(3):
        waker.wake()
    assert is_awake(waker)
    waker.clear()
    assert not is_awake(waker)
    waker.clear()
    waker.wake()
    assert is_awake(waker)


def test_after_closing_nothing_happens(waker: Waker) -> None:
    waker.close()
    waker.wake()
    waker.clear()
    waker.close()
