from __future__ import annotations

import threading

import pytest

from support.kv.store_parts import GatedStore
from trencadis.errors import TransferError
from trencadis_kv.store.client import StoreClient
from trencadis_testing.kv_faults import DictStore


def test_connection_is_made_with_the_first_call_and_kept():
    made = []

    def make():
        made.append(DictStore({"a": b"1"}))
        return made[-1]

    client = StoreClient(make, name="shelf")
    assert not made
    assert [client.call(lambda store: store.contains(["a"])) for _ in range(2)] == [1, 1]
    assert len(made) == 1


def test_what_a_store_raises_is_a_transfer_error_with_its_cause():
    client = StoreClient(lambda: DictStore({}), name="shelf")
    with pytest.raises(TransferError, match=r"shelf raised KeyError: 'x'") as caught:
        client.call(lambda store: {}["x"])
    assert caught.value.cause == "raised"
    assert isinstance(caught.value.__cause__, KeyError)


def test_transfer_errors_pass_as_they_are():
    def full(store):
        raise TransferError("no room", cause="full")

    with pytest.raises(TransferError, match="no room") as caught:
        StoreClient(lambda: DictStore({}), name="shelf").call(full)
    assert caught.value.cause == "full"


def test_connection_that_cannot_be_made_is_tried_again_with_the_next_call():
    attempts = iter([OSError("refused"), DictStore({"a": b""})])

    def make():
        found = next(attempts)
        if isinstance(found, Exception):
            raise found
        return found

    client = StoreClient(make, name="shelf")
    with pytest.raises(TransferError, match="OSError: refused"):
        client.call(lambda store: store.contains(["a"]))
    assert client.call(lambda store: store.contains(["a"])) == 1


def test_call_that_waits_is_interrupted_from_another_thread():
    store = GatedStore({})
    client = StoreClient(lambda: store, name="shelf")
    threading.Thread(target=lambda: (store.is_waiting.wait(60.0), client.interrupt())).start()
    with pytest.raises(TransferError, match="contains was interrupted"):
        client.call(lambda store: store.contains(["a"]))


def test_interrupt_does_nothing_while_no_call_runs():
    interrupted = []
    store = DictStore({})
    store.interrupt = lambda: interrupted.append(1)
    client = StoreClient(lambda: store, name="shelf")
    client.interrupt()
    client.call(lambda store: store.contains([]))
    client.interrupt()
    assert not interrupted


def test_close_gives_the_connection_up_once():
    closed = []
    store = DictStore({})
    store.close = lambda: closed.append(1)
    client = StoreClient(lambda: store, name="shelf")
    client.close()
    client.call(lambda store: store.contains([]))
    client.close()
    client.close()
    assert closed == [1]


def test_store_that_raises_from_interrupt_or_close_costs_a_warning(caplog):
    store = GatedStore({})
    store.close = store.interrupt = lambda: 1 / 0
    client = StoreClient(lambda: store, name="shelf")
    threading.Thread(target=lambda: (store.is_waiting.wait(60.0), client.interrupt(), store.open())).start()
    store.gate.clear()
    store.interrupt_waiters(interrupted=False)
    client.call(lambda store: store.contains([]))
    client.close()
    assert "raised from interrupt()" in caplog.text
    assert "raised from close()" in caplog.text
