from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from trencadis.interfaces import (
    ConnectorPair,
    KVSchedulerSide,
    Lookup,
    SupportsHandover,
    SupportsLayerwise,
    SupportsMetrics,
    SupportsRemotePrefill,
    SupportsStepTimes,
)
from trencadis.records import ConnectorReport, FailedLoad, Request
from trencadis_testing.doubles import LoopConnector
from trencadis_testing.executor_fakes import QuietWorker
from trencadis_testing.kv_watch import TransferBooks, watched


def reported(**fields: Any) -> ConnectorReport:
    return ConnectorReport(**fields)


FAILED = FailedLoad(transfer_id=7, num_valid_tokens=0, cause="evicted")


def test_books_of_transfer_ids_that_end_once_are_in_order():
    books = TransferBooks()
    for transfer_id in (6, 7, 8):
        books.begun(transfer_id)
    books.cancelled(8)
    books.held(9)
    books.held(None)
    books.reported(reported(loaded=(6,), failed=(FAILED,), released=(8, 9)))
    assert books.faults() == []
    assert (books.num_loads, books.num_loaded, dict(books.causes)) == (3, 1, {"evicted": 1})


@pytest.mark.parametrize(
    ("reports", "fault"),
    [
        ([reported(loaded=(7,)), reported(loaded=(7,))], "load 7 was reported as loaded, loaded"),
        ([reported(loaded=(7,), failed=(FAILED,))], "load 7 was reported as loaded, failed"),
        ([reported(loaded=(7, 5))], "load 5 was reported as never begun, loaded"),
        ([reported()], "load 7 has no end: neither reported nor given up"),
        ([reported(loaded=(7,), released=(7,))], "transfer id 7 was released 1 times, 0 releases are owed"),
    ],
)
def test_books_that_are_not_in_order_say_so(reports, fault):
    books = TransferBooks()
    books.begun(7)
    for report in reports:
        books.reported(report)
    assert books.faults() == [fault]


def test_a_transfer_id_that_is_given_up_is_owed_a_release():
    books = TransferBooks()
    books.begun(7)
    books.cancelled(7)
    assert books.faults() == ["transfer id 7 was released 0 times, 1 releases are owed"]


def test_hit_of_which_the_engine_says_nothing_is_a_fault():
    books = TransferBooks()
    for transfer_id in (1, 2, 3):
        books.offered(Lookup(num_tokens=4, transfer_id=transfer_id))
    books.offered(Lookup())
    books.offered(Lookup(pending=True))
    books.begun(1)
    books.reported(reported(loaded=(1,)))
    books.unused(2)
    assert books.faults() == ["hit 3 was neither loaded nor said to be of no use"]


CAPABILITIES = (SupportsHandover, SupportsRemotePrefill, SupportsLayerwise, SupportsStepTimes, SupportsMetrics)
PUBLIC = {
    name: method
    for base in (KVSchedulerSide, *CAPABILITIES)
    for name, method in vars(base).items()
    if not name.startswith("_")
}


def told() -> Any:
    """Return a scheduler side that notes every call and answers with its name."""
    calls: list[str] = []

    def noting(name: str) -> Callable[..., str]:
        return lambda *_, **__: calls.append(name) or name

    members = {name: noting(name) for name in PUBLIC}
    return type("Told", (KVSchedulerSide, *CAPABILITIES), {**members, "calls": calls})()


class ToldWorker(QuietWorker):
    """Every call of a worker side that has a default is noted."""

    wants_layers = True

    def __init__(self):
        self.calls = []

    def expect_layers(self):
        self.calls.append("expect_layers")

    def wait_layer(self, layer, *, budget_s):
        self.calls.append(("wait_layer", layer, budget_s))
        return False


def test_layers_of_the_worker_side_reach_it():
    worker_side = ToldWorker()
    worker = watched(ConnectorPair(scheduler=told(), worker=worker_side))[0].worker
    worker.expect_layers()
    assert worker.wants_layers is True
    assert worker.wait_layer(2, budget_s=0.5) is False
    assert worker_side.calls == ["expect_layers", ("wait_layer", 2, 0.5)]


def test_every_call_reaches_the_connector_and_its_answer_comes_back():
    side, request = told(), Request(request_id="a", prompt_token_ids=(1,))
    given = {
        "request": request,
        "transfer_id": 1,
        "blocks": (),
        "block_hashes": (),
        "num_local_tokens": 0,
        "num_tokens": 4,
        "report": ConnectorReport(),
        "failed": FAILED,
    }
    watcher = watched(ConnectorPair(scheduler=side, worker=LoopConnector().worker))[0].scheduler
    side.lookup = lambda *_, **__: side.calls.append("lookup") or Lookup()
    for name, method in PUBLIC.items():
        parameters = inspect.signature(method).parameters.values()
        known = [one for one in parameters if one.name != "self"]
        places = [given.get(one.name) for one in known if one.kind is one.POSITIONAL_OR_KEYWORD]
        named = {one.name: given.get(one.name) for one in known if one.kind is one.KEYWORD_ONLY}
        answer = getattr(watcher, name)(*places, **named)
        assert answer in (name, None) or name == "lookup", name
    assert set(side.calls) == set(PUBLIC), "a method of the contract is not passed on"


def test_it_has_the_capabilities_of_the_connector_and_no_others():
    side = watched(LoopConnector().pair())[0].scheduler
    assert isinstance(side, SupportsLayerwise)
    assert not isinstance(side, SupportsRemotePrefill | SupportsStepTimes | SupportsMetrics)


def test_what_the_worker_side_reports_is_noted_although_the_engine_passes_less_on():
    """A load that is reported twice is one to the scheduler side; the books must not be blind to it."""
    loop = LoopConnector()
    pair, books = watched(loop.pair())
    books.begun(7)
    loop.worker.poll = lambda: reported(loaded=(7, 7))
    assert pair.worker.poll() == reported(loaded=(7, 7))
    pair.scheduler.on_report(reported(loaded=(7,)))
    assert books.faults() == ["load 7 was reported as loaded, loaded"]
