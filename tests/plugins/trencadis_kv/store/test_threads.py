from __future__ import annotations

import os
import threading

import pytest

from support.kv.store_parts import GatedStore
from trencadis.errors import TransferError
from trencadis_kv.store.activity import Activity
from trencadis_kv.store.client import StoreClient
from trencadis_kv.store.threads import StoreThreads
from trencadis_testing.kv_faults import DictStore


class Task:
    def __init__(self, do=lambda client: None):
        self.do = do
        self.is_wanted = True
        self.error = None
        self.done = threading.Event()

    def run(self, client):
        try:
            self.do(client)
        except TransferError as error:
            self.error = error
        self.done.set()


@pytest.fixture
def activity():
    return Activity()


@pytest.fixture
def make_threads(activity):
    made = []

    def make(store=None, num_threads=1):
        store = store or DictStore({})
        threads = StoreThreads(
            "test", num_threads, make_client=lambda: StoreClient(lambda: store, name="shelf"), activity=activity
        )
        made.append(threads)
        return threads

    yield make
    assert all(threads.close(5.0) for threads in made)


def ask(client):
    client.call(lambda store: store.contains(["a"]))


def test_tasks_are_done_in_the_order_they_came(make_threads, activity):
    threads, order = make_threads(), []
    for i in range(20):
        assert threads.put(Task(lambda client, i=i: order.append(i)))
    assert activity.wait_idle(60.0)
    assert order == list(range(20))


@pytest.mark.skipif(not hasattr(os, "sched_getscheduler"), reason="this system has no scheduling policies")
def test_threads_interrupt_nobody_when_they_wake_up(make_threads, activity):
    threads, policies = make_threads(), []
    threads.put(Task(lambda client: policies.append(os.sched_getscheduler(0))))
    assert activity.wait_idle(60.0)
    assert policies == [os.SCHED_BATCH]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER, "this thread is another one"


def test_every_thread_has_a_connection_of_its_own(activity):
    made, meet = [], threading.Barrier(2, timeout=10.0)
    threads = StoreThreads(
        "test",
        2,
        make_client=lambda: StoreClient(lambda: made.append(DictStore({})) or made[-1], name="shelf"),
        activity=activity,
    )
    tasks = [Task(lambda client: (ask(client), meet.wait())) for _ in range(2)]
    for task in tasks:
        threads.put(task)
    assert activity.wait_idle(60.0)
    assert len(made) == 2
    assert threads.close(5.0)


def test_queued_task_is_taken_back_and_a_running_one_is_not(make_threads, activity):
    store = GatedStore({})
    threads, running, queued = make_threads(store), Task(ask), Task()
    threads.put(running)
    assert store.is_waiting.wait(60.0)
    threads.put(queued)
    assert threads.is_running(running)
    assert [threads.take_back(queued), threads.take_back(queued), threads.take_back(running)] == [True, False, False]
    store.open()
    assert activity.wait_idle(60.0)
    assert not queued.done.is_set()
    assert not threads.is_running(running)


def test_only_calls_that_nobody_waits_for_are_interrupted(make_threads):
    store = GatedStore({})
    threads, task = make_threads(store), Task(ask)
    threads.put(task)
    assert store.is_waiting.wait(60.0)
    threads.interrupt_unwanted()
    assert store.is_waiting.is_set()
    task.is_wanted = False
    threads.interrupt_unwanted()
    assert task.done.wait(60.0)
    assert task.error.cause == "unreachable"


def test_close_interrupts_what_runs_and_forgets_what_waits(activity):
    store = GatedStore({})
    threads = StoreThreads("test", 1, make_client=lambda: StoreClient(lambda: store, name="shelf"), activity=activity)
    running, queued = Task(ask), Task()
    threads.put(running)
    assert store.is_waiting.wait(60.0)
    threads.put(queued)
    assert threads.close(10.0)
    assert running.error.cause == "unreachable"
    assert not queued.done.is_set()
    assert activity.wait_idle(0.0)
    assert not threads.put(Task())
    assert threads.close(0.0)


def test_thread_that_does_not_end_is_named_and_left_behind(activity, caplog):
    gate, started = threading.Event(), threading.Event()
    threads = StoreThreads("stuck", 1, make_client=lambda: StoreClient(lambda: None, name="shelf"), activity=activity)
    threads.put(Task(lambda client: (started.set(), gate.wait(20.0))))
    assert started.wait(60.0)
    assert not threads.drain(0.0)
    assert not threads.close(0.06)
    assert "stuck does not end" in caplog.text
    gate.set()
    assert threads.close(5.0)


def test_connection_is_made_with_the_first_call_kept_and_given_up_once():
    made, told = [], []

    def make():
        made.append(DictStore({"a": b"1"}))
        made[-1].close, made[-1].interrupt = lambda: told.append("close"), lambda: told.append("interrupt")
        if len(made) == 1:
            raise OSError("refused")
        return made[-1]

    client = StoreClient(make, name="shelf")
    client.close()
    assert not made
    with pytest.raises(TransferError, match="OSError: refused"):
        client.call(lambda store: store.contains(["a"]))
    assert [client.call(lambda store: store.contains(["a"])) for _ in range(2)] == [1, 1], "it is tried again"
    assert len(made) == 2
    client.interrupt()  # no call runs
    client.close()
    client.close()
    assert told == ["close"]


def test_what_a_store_raises_is_a_transfer_error_with_its_cause_and_such_errors_pass():
    client = StoreClient(lambda: DictStore({}), name="shelf")
    with pytest.raises(TransferError, match=r"shelf raised KeyError: 'x'") as caught:
        client.call(lambda store: {}["x"])
    assert (caught.value.cause, type(caught.value.__cause__)) == ("raised", KeyError)

    def full(store):
        raise TransferError("no room", cause="full")

    with pytest.raises(TransferError, match="no room") as caught:
        client.call(full)
    assert caught.value.cause == "full"


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
