from __future__ import annotations

import threading

import pytest

from trencadis.errors import TransferError
from trencadis.records import TransferCause
from trencadis_kv.connectors.mooncake.connector import IOWorker
from trencadis_kv.connectors.native_calls import LeftBehind


class Library:
    """Counts what is registered; stands in for the package's client."""

    def __init__(self, code=0):
        self.code = code
        self.registered = []
        self.changed = threading.Event()

    def register_buffer(self, address, num_bytes):
        self.registered.append((address, num_bytes))
        return self.code

    def unregister_buffer(self, address):
        self.registered = [one for one in self.registered if one[0] != address]
        self.changed.set()
        return 0


def test_buffer_is_registered_for_the_first_call_and_until_the_end():
    library = Library()
    io_worker = IOWorker(library, 4096, left=LeftBehind(1))
    assert library.registered == []
    assert io_worker.run(lambda one: len(one.registered), timeout_s=5.0) == 1
    assert io_worker.run(lambda one: one.registered[:], timeout_s=5.0) == [(io_worker.address, 4096)]
    io_worker.close()
    assert library.changed.wait(60.0)
    assert library.registered == []


def test_memory_that_cannot_be_registered_is_an_error():
    io_worker = IOWorker(Library(code=-1), 4096, left=LeftBehind(1))
    with pytest.raises(TransferError, match="registers no memory: code -1") as caught:
        io_worker.run(lambda _: 1, timeout_s=5.0)
    assert caught.value.cause == TransferCause.RAISED
    io_worker.close()


def test_buffer_of_a_call_that_was_left_behind_stays_registered_until_it_returns():
    library, go_on = Library(), threading.Event()
    io_worker = IOWorker(library, 4096, left=LeftBehind(1))
    with pytest.raises(TransferError):
        io_worker.run(lambda _: go_on.wait(), timeout_s=0.05)
    assert io_worker.is_left
    io_worker.close()
    assert library.registered
    go_on.set()
    assert library.changed.wait(60.0)
    assert library.registered == []
