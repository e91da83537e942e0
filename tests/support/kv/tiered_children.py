"""Children for the tiered connector that do what connectors must not, and tiers made of any children."""

from __future__ import annotations

from trencadis.clock import SimulatedClock
from trencadis.interfaces import (
    ComponentContext,
    ConnectorPair,
    KVSchedulerSide,
    KVWorkerSide,
    Lookup,
    SupportsHandover,
    SupportsMetrics,
    SupportsRemotePrefill,
    SupportsStepTimes,
)
from trencadis.records import ConnectorReport
from trencadis_kv.connectors.tiered.config import TieredConfig
from trencadis_kv.connectors.tiered.connector import make_tiered
from trencadis_testing.doubles import LoopConnector


def tiers(children, *, clock=None, policy=None, **options):

    def make(noun, name):
        if noun == "kv_policy" and policy is None:
            from trencadis.errors import ContractError

            raise ContractError("no policy")
        return policy if noun == "kv_policy" else children[name]

    context = ComponentContext(clock=clock or SimulatedClock(), seed=0, make=make)
    return make_tiered(TieredConfig(children=tuple(children), **options), context)


def loop(**options):
    return LoopConnector(**options).pair()


def _raises(*args, **options):
    raise RuntimeError("not today")


def _raising(name, bases, calls, **more):
    """Return a class that raises whatever it is asked."""
    return type(name, bases, {**dict.fromkeys(calls.split(), _raises), **more})


RaisingScheduler = _raising(
    "RaisingScheduler",
    (KVSchedulerSide, SupportsHandover, SupportsStepTimes, SupportsMetrics),
    "lookup on_allocated on_computed on_finished on_cancelled take_message on_report on_failed finished_params "
    "on_rejected on_step metrics close",
)
RaisingWorker = _raising(
    "RaisingWorker", (KVWorkerSide,), "begin_step end_step poll close", register=lambda self, kv_cache: None
)


def raising():
    return ConnectorPair(scheduler=RaisingScheduler(), worker=RaisingWorker())


class ScriptedScheduler(KVSchedulerSide, SupportsHandover, SupportsRemotePrefill, SupportsMetrics):
    """Has what a test says, and remembers what it was told.

    Attributes:
        num_tokens: What every look-up finds.
        pending: Look-ups are pending.
        told: Names of calls and their arguments.
    """

    def __init__(self, *, num_tokens=0, pending=False, holds=(), params=None, retries=False):
        self.num_tokens = num_tokens
        self.pending = pending
        self.holds = list(holds)
        self.params = params
        self.retries = retries
        self.told = []
        self.transfer_ids = iter(range(1000))

    def lookup(self, request, *, block_hashes, num_local_tokens):
        self.told.append(("lookup", request.request_id))
        if self.pending:
            return Lookup(pending=True)
        return Lookup(num_tokens=self.num_tokens, transfer_id=next(self.transfer_ids)) if self.num_tokens else Lookup()

    def on_unused(self, transfer_id):
        self.told.append(("on_unused", transfer_id))

    def on_allocated(self, transfer_id, *, blocks, block_hashes):
        self.told.append(("on_allocated", transfer_id, list(blocks)))

    def on_computed(self, *, blocks, block_hashes):
        self.told.append(("on_computed", list(blocks), list(block_hashes)))

    def on_finished(self, request, *, blocks):
        return self.holds.pop(0) if self.holds else None

    def on_cancelled(self, transfer_id):
        self.told.append(("on_cancelled", transfer_id))

    def take_message(self):
        return b""

    def on_report(self, report):
        if report != ConnectorReport():
            self.told.append(("on_report", report))

    def on_failed(self, request, failed):
        self.told.append(("on_failed", failed.transfer_id))
        return "retry" if self.retries else "compute"

    def finished_params(self, request):
        return self.params

    def on_waker(self, wake):
        self.told.append(("on_waker", wake))

    def take_requests(self):
        return ()

    def on_request_ended(self, request_id, *, transfer_params, error):
        self.told.append(("on_request_ended", request_id, transfer_params, error))

    def metrics(self):
        return ""

    def on_rejected(self, transfer_params):
        self.told.append(("on_rejected", transfer_params))

    def close(self):
        self.told.append(("close",))


class ScriptedWorker(KVWorkerSide):
    """Reports what a test puts into ``report``, once."""

    def __init__(self):
        self.report = ConnectorReport()
        self.told = []

    def register(self, kv_cache):
        self.told.append("register")

    def begin_step(self, message):
        self.told.append(("begin_step", message))

    def end_step(self):
        self.told.append("end_step")

    def poll(self):
        report, self.report = self.report, ConnectorReport()
        return report

    def close(self):
        self.told.append("close")


def scripted(**options):
    return ConnectorPair(scheduler=ScriptedScheduler(**options), worker=ScriptedWorker())
