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


class RaisingScheduler(KVSchedulerSide, SupportsHandover, SupportsStepTimes, SupportsMetrics):
    """Raises whatever it is asked."""

    def lookup(self, request, *, block_hashes, num_local_tokens):
        raise RuntimeError("no look-up")

    def on_allocated(self, transfer_id, *, blocks, block_hashes):
        raise RuntimeError("no load")

    def on_computed(self, *, blocks, block_hashes):
        raise RuntimeError("no save")

    def on_finished(self, request, *, blocks):
        raise RuntimeError("no end")

    def on_cancelled(self, transfer_id):
        raise RuntimeError("no way back")

    def take_message(self):
        raise RuntimeError("no message")

    def on_report(self, report):
        raise RuntimeError("no report")

    def on_failed(self, request, failed):
        raise RuntimeError("no advice")

    def finished_params(self, request):
        raise RuntimeError("no parameters")

    def on_rejected(self, transfer_params):
        raise RuntimeError("no mercy")

    def on_step(self, *, num_tokens, device_s):
        raise RuntimeError("no step")

    def metrics(self):
        raise RuntimeError("no metrics")

    def close(self):
        raise RuntimeError("no end")


class RaisingWorker(KVWorkerSide):
    """Raises whatever it is asked."""

    def register(self, kv_cache):
        pass

    def begin_step(self, message):
        raise RuntimeError("no begin")

    def end_step(self):
        raise RuntimeError("no end")

    def poll(self):
        raise RuntimeError("no report")

    def close(self):
        raise RuntimeError("no close")


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
