"""Memory for blocks that are sent along with an offer; engines that send them are in ``tests/integration/disaggregation``."""

from __future__ import annotations

import threading
import time

import pytest

from trencadis.errors import TransferError
from trencadis.records import TransferCause
from trencadis_kv.connectors.p2p.push import Push, Pushes

BLOCK_BYTES = 96
HASHES = [bytes([i]) * 32 for i in range(6)]
PATIENCE_S = 60.0


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def test_memory_is_set_aside_up_to_the_limit_and_comes_back_once() -> None:
    pushes = Pushes(5 * BLOCK_BYTES)
    first = pushes.open(HASHES[:4], block_bytes=BLOCK_BYTES)
    second = pushes.open(HASHES[:4], block_bytes=BLOCK_BYTES)
    assert first is not None
    assert second is not None
    assert (len(first.hashes), len(second.hashes)) == (4, 1)
    assert pushes.num_bytes == first.num_bytes + second.num_bytes == 5 * BLOCK_BYTES
    assert pushes.open(HASHES, block_bytes=BLOCK_BYTES) is None
    assert pushes.open([], block_bytes=BLOCK_BYTES) is None
    for _ in range(2):
        first.close()
        first.end()
    assert pushes.num_bytes == BLOCK_BYTES


def test_memory_is_free_only_when_neither_side_uses_it() -> None:
    pushes = Pushes(BLOCK_BYTES)
    for close_first in (True, False):
        push = pushes.open(HASHES, block_bytes=BLOCK_BYTES)
        assert push is not None
        steps = [push.close, push.end] if close_first else [push.end, push.close]
        steps[0]()
        assert pushes.num_bytes == BLOCK_BYTES, "the other may still touch it"
        steps[1]()
        assert pushes.num_bytes == 0


def push_of(num_blocks: int) -> Push:
    push = Pushes(1 << 20).open(HASHES[:num_blocks], block_bytes=BLOCK_BYTES)
    assert push is not None
    return push


def test_blocks_are_taken_as_they_come() -> None:
    push = push_of(3)
    push.begin(3, lambda: None)
    for index in range(3):
        push.row(index)[:] = index
        push.came()
        assert push.wait(index, until_s=soon())[:, 0].tolist() == list(range(index + 1))
    assert len(push.wait(3, until_s=soon())) == 3, "no more are due, although nobody has said the end"


@pytest.mark.parametrize("how", ["end", "close", "fewer", "time"])
def test_nobody_waits_for_what_does_not_come(how: str) -> None:
    push = push_of(3)
    push.begin(3, lambda: None)
    push.came()
    found: list[int] = []
    until_s = time.monotonic() + 0.05 if how == "time" else soon()
    waiter = threading.Thread(target=lambda: found.append(len(push.wait(1, until_s=until_s))))
    waiter.start()
    if how == "end":
        push.end(TransferError("broken", cause=TransferCause.UNREACHABLE))
    elif how == "close":
        push.close()
    elif how == "fewer":
        push.begin(1, lambda: None)
    waiter.join(PATIENCE_S)
    assert found == [0 if how == "close" else 1]


def test_closing_cuts_what_comes_unless_all_is_there() -> None:
    cuts: list[str] = []
    for name, num_there in (("some", 1), ("all", 2)):
        push = push_of(2)
        push.begin(2, lambda name=name: cuts.append(name))  # type: ignore[misc]
        for _ in range(num_there):
            push.came()
        push.close()
        with pytest.raises(TransferError):
            push.row(0)
    late = push_of(2)
    late.close()
    late.begin(2, lambda: cuts.append("late"))
    assert cuts == ["some", "late"]


def test_push_is_taken_by_its_hold_id_once_and_what_is_left_is_closed() -> None:
    pushes = Pushes(1 << 20)
    one, two = (pushes.open(HASHES, block_bytes=BLOCK_BYTES) for _ in range(2))
    assert one is not None
    assert two is not None
    pushes.name("a", one)
    pushes.name("b", two)
    assert pushes.take("a") is one
    assert pushes.take("a") is None
    pushes.close()
    assert (one.is_closed, two.is_closed) == (False, True)
