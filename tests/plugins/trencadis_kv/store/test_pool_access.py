from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from trencadis.errors import TransferError
from trencadis_kv.store.pool_access import PoolAccess, is_on_host
from trencadis_testing.fake_pool import FakeKVCache


def pool_of(*, any_thread: bool) -> FakeKVCache:
    pool = FakeKVCache([np.arange(40, dtype=np.int64)], block_size=4)
    pool.any_thread = any_thread
    return pool


def background(call: Callable[[], None]) -> tuple[threading.Thread, list[Exception]]:
    errors: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def serve_until_done(access: PoolAccess, thread: threading.Thread, *, max_bytes: int = 1 << 20) -> None:
    while thread.is_alive():
        access.serve(max_bytes=max_bytes)
        thread.join(0.001)


@pytest.mark.parametrize("any_thread", [True, False])
def test_blocks_are_read_and_written_from_any_thread(any_thread: bool) -> None:
    access = PoolAccess(pool_of(any_thread=any_thread))
    rows = np.empty((2, 32), np.uint8)

    def move() -> None:
        access.read([9, 1], rows, timeout_s=5)
        access.write([0, 3], rows, timeout_s=5)

    thread, errors = background(move)
    serve_until_done(access, thread)
    assert errors == []
    assert access.layout.block_bytes == 32
    assert access.any_thread == any_thread
    out = np.empty((2, 32), np.uint8)
    thread, _ = background(lambda: access.read([0, 3], out, timeout_s=5))
    serve_until_done(access, thread)
    assert out.view(np.int64).tolist() == [[36, 37, 38, 39], [4, 5, 6, 7]]


@pytest.mark.parametrize("any_thread", [True, False])
def test_blocks_are_seen_where_they_lie_if_that_may_be_any_threads(any_thread: bool) -> None:
    pool = pool_of(any_thread=any_thread)
    views = [[memoryview(b"where it lies")]]
    pool.view_blocks = lambda blocks: views if blocks == [7] else None
    access = PoolAccess(pool)
    assert access.view([7]) == (views if any_thread else None)
    assert access.view([8]) is None
    access.close()
    with pytest.raises(TransferError) as caught:
        access.view([7])
    assert caught.value.cause == "cancelled"


def test_step_copies_no_more_than_it_may_but_at_least_something() -> None:
    access = PoolAccess(pool_of(any_thread=False))
    threads = [background(lambda: access.read([1], np.empty((1, 32), np.uint8), timeout_s=5))[0] for _ in range(5)]
    while len(access._jobs) < 5:
        threading.Event().wait(0.001)
    access.serve(max_bytes=70)
    assert len(access._jobs) == 3
    access.serve(max_bytes=1)
    assert len(access._jobs) == 2
    access.serve(max_bytes=1000)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_copy_that_nobody_serves_in_time_is_never_done() -> None:
    pool = pool_of(any_thread=False)
    access = PoolAccess(pool)
    with pytest.raises(TransferError) as caught:
        access.write([0], np.zeros((1, 32), np.uint8), timeout_s=0.01)
    assert caught.value.cause == "deadline"
    access.serve(max_bytes=1000)
    assert pool[0][:4].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("any_thread", [True, False])
def test_nothing_is_touched_after_close(any_thread: bool) -> None:
    access = PoolAccess(pool_of(any_thread=any_thread))
    access.close()
    with pytest.raises(TransferError) as caught:
        access.read([0], np.empty((1, 32), np.uint8), timeout_s=5)
    assert caught.value.cause == "cancelled"


def test_close_sends_away_who_waits() -> None:
    access = PoolAccess(pool_of(any_thread=False))
    thread, errors = background(lambda: access.read([0], np.empty((1, 32), np.uint8), timeout_s=60))
    while not access._jobs:
        threading.Event().wait(0.001)
    access.close()
    thread.join(60)
    assert [getattr(error, "cause", "") for error in errors] == ["cancelled"]


@pytest.mark.parametrize("any_thread", [True, False])
@pytest.mark.parametrize("is_seen", [True, False])
def test_blocks_are_the_hosts_if_any_thread_may_read_them_where_they_lie(any_thread: bool, is_seen: bool) -> None:
    pool = pool_of(any_thread=any_thread)
    pool.view_blocks = lambda blocks: [] if is_seen else None
    assert is_on_host(pool) == (any_thread and is_seen)
