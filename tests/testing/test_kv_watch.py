from __future__ import annotations

from collections.abc import Mapping
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


class Told(
    KVSchedulerSide, SupportsHandover, SupportsRemotePrefill, SupportsLayerwise, SupportsStepTimes, SupportsMetrics
):
    """Notes every call."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def lookup(self, request, *, block_hashes, num_local_tokens):
        self.calls.append("lookup")
        return Lookup()

    def on_unused(self, transfer_id):
        self.calls.append("on_unused")

    def on_allocated(self, transfer_id, *, blocks, block_hashes):
        self.calls.append("on_allocated")

    def on_computed(self, *, blocks, block_hashes):
        self.calls.append("on_computed")

    def on_finished(self, request, *, blocks):
        self.calls.append("on_finished")

    def finished_params(self, request) -> Mapping[str, Any] | None:
        self.calls.append("finished_params")
        return {"a": 1}

    def on_cache_hit(self, request, *, num_tokens):
        self.calls.append("on_cache_hit")

    def on_rejected(self, transfer_params):
        self.calls.append("on_rejected")

    def on_cancelled(self, transfer_id):
        self.calls.append("on_cancelled")

    def take_message(self):
        self.calls.append("take_message")
        return b"message"

    def on_report(self, report):
        self.calls.append("on_report")

    def on_failed(self, request, failed):
        self.calls.append("on_failed")
        return "retry"

    def on_ready(self, layout):
        self.calls.append("on_ready")

    def on_abandoned(self, request):
        self.calls.append("on_abandoned")

    def on_role(self, role):
        self.calls.append("on_role")

    def on_waker(self, wake):
        self.calls.append("on_waker")

    def take_requests(self):
        self.calls.append("take_requests")
        return ["request"]

    def take_withdrawn(self):
        self.calls.append("take_withdrawn")
        return ["withdrawn"]

    def on_layerwise(self, transfer_id):
        self.calls.append("on_layerwise")

    def on_sampling(self, terms):
        self.calls.append("on_sampling")

    def on_request_token(self, request_id, first):
        self.calls.append("on_request_token")

    def on_request_ended(self, request_id, *, transfer_params, error):
        self.calls.append("on_request_ended")

    def on_backlog(self, num_tokens):
        self.calls.append("on_backlog")

    def on_step(self, *, num_tokens, device_s):
        self.calls.append("on_step")

    def metrics(self):
        self.calls.append("metrics")
        return "text"

    def close(self):
        self.calls.append("close")


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
    told = ToldWorker()
    worker = watched(ConnectorPair(scheduler=Told(), worker=told))[0].worker
    worker.expect_layers()
    assert worker.wants_layers is True
    assert worker.wait_layer(2, budget_s=0.5) is False
    assert told.calls == ["expect_layers", ("wait_layer", 2, 0.5)]


def test_every_call_reaches_the_connector():
    told, request = Told(), Request(request_id="a", prompt_token_ids=(1,))
    pair, _ = watched(ConnectorPair(scheduler=told, worker=LoopConnector().worker))
    side: Any = pair.scheduler
    side.lookup(request, block_hashes=(), num_local_tokens=0)
    side.on_allocated(1, blocks=(), block_hashes=())
    side.on_unused(2)
    side.on_layerwise(1)
    side.on_computed(blocks=(), block_hashes=())
    side.on_cache_hit(request, num_tokens=4)
    side.on_finished(request, blocks=())
    assert side.finished_params(request) == {"a": 1}
    side.on_rejected({})
    side.on_cancelled(1)
    assert side.take_message() == b"message"
    side.on_report(ConnectorReport())
    assert side.on_failed(request, FAILED) == "retry"
    side.on_ready(None)
    side.on_abandoned(request)
    side.on_sampling(None)
    side.on_role("prefill")
    side.on_waker(print)
    assert (side.take_requests(), side.take_withdrawn()) == (["request"], ["withdrawn"])
    side.on_request_token("a", None)
    side.on_request_ended("a", transfer_params=None, error="")
    side.on_backlog(7)
    side.on_step(num_tokens=1, device_s=0.1)
    assert side.metrics() == "text"
    side.close()
    public = {name for base in Told.__bases__ for name in vars(base) if not name.startswith("_")}
    assert set(told.calls) == public, "a method of the contract is not passed on"


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
