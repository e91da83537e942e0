"""A KV connector as third parties wrote it for version 1 of the interface, with every method of its scheduler side. Frozen: it is never edited.

It goes when version 1 is no longer accepted.
"""

from __future__ import annotations

from trencadis import Component, hookimpl
from trencadis.interfaces import ConnectorPair, KVSchedulerSide, KVWorkerSide, Lookup
from trencadis.records import ConnectorReport, FailedLoad, Request


class Everything(KVSchedulerSide):
    """A store in a dictionary that also runs a request of its own; notes every call."""

    def __init__(self, store):
        self.store = store
        self.calls = []
        self.prompts = [Request(request_id="from elsewhere", prompt_token_ids=tuple(range(40, 53)))]
        self.message = b""
        self.next_ticket = 0
        self.fails = True

    def lookup(self, request, *, block_hashes, num_local_tokens):
        self.calls.append("lookup")
        num_blocks = 0
        while num_blocks < len(block_hashes) and block_hashes[num_blocks] in self.store.known:
            num_blocks += 1
        if request.request_id.startswith("unused"):
            num_blocks = min(1, num_blocks)
        if not num_blocks:
            return Lookup()
        self.next_ticket += 1
        return Lookup(
            num_tokens=num_blocks * 4,
            ticket=self.next_ticket,
            timeout_s=5.0,
            layerwise=request.request_id.startswith("layers"),
        )

    def on_allocated(self, ticket, *, blocks, block_hashes):
        self.calls.append("on_allocated")
        self.store.loads[ticket] = [list(blocks), list(block_hashes)]

    def on_layerwise(self, ticket):
        self.calls.append("on_layerwise")
        self.store.layered.append(ticket)

    def on_computed(self, *, blocks, block_hashes):
        self.calls.append("on_computed")
        self.store.saves.extend(zip(blocks, block_hashes, strict=True))
        self.message = b"save"

    def on_finished(self, request, *, blocks):
        self.calls.append("on_finished")
        self.next_ticket += 1
        self.store.held.append(self.next_ticket)
        return self.next_ticket

    def on_unused(self, ticket):
        self.calls.append("on_unused")

    def finished_params(self, request):
        self.calls.append("finished_params")
        return {"of": request.request_id}

    def on_rejected(self, transfer_params):
        self.calls.append("on_rejected")

    def on_abandoned(self, request):
        self.calls.append("on_abandoned")

    def on_cancelled(self, ticket):
        self.calls.append("on_cancelled")
        self.store.loads.pop(ticket, None)
        self.store.held.append(ticket)

    def take_message(self):
        self.calls.append("take_message")
        message, self.message = self.message, b""
        return message

    def on_report(self, report):
        self.calls.append("on_report")
        assert [failed.ticket for failed in report.failed] == self.store.failed[: len(report.failed)]

    def on_failed(self, request, failed):
        self.calls.append("on_failed")
        assert failed.ticket in self.store.failed
        return "compute"

    def on_ready(self, layout):
        self.calls.append("on_ready")

    def on_sampling(self, terms):
        self.calls.append("on_sampling")

    def on_role(self, role):
        self.calls.append("on_role")

    def on_waker(self, wake):
        self.calls.append("on_waker")

    @property
    def has_requests(self):
        return bool(self.prompts)

    def take_requests(self):
        self.calls.append("take_requests")
        prompts, self.prompts = self.prompts, []
        return prompts

    def take_withdrawn(self):
        self.calls.append("take_withdrawn")
        return ()

    def on_request_token(self, request_id, first):
        self.calls.append("on_request_token")

    def on_request_ended(self, request_id, *, transfer_params, error):
        self.calls.append("on_request_ended")
        assert (transfer_params, error) == ({"of": request_id}, "")

    def on_backlog(self, num_tokens):
        self.calls.append("on_backlog")

    def on_step(self, *, num_tokens, device_s):
        self.calls.append("on_step")

    def metrics(self):
        self.calls.append("metrics")
        return "trencadis_kv_canary 1\n"

    def close(self):
        self.calls.append("close")


class Store:
    """What both sides share."""

    def __init__(self):
        self.known = {}
        self.saves = []
        self.loads = {}
        self.layered = []
        self.held = []
        self.failed = []


class Worker(KVWorkerSide):
    """Moves the blocks of a fake backend, whose cache is a tuple of arrays; its first load fails."""

    def __init__(self, store):
        self.store = store

    def register(self, kv_cache):
        self.arrays = kv_cache

    def begin_step(self, message):
        for block, block_hash in self.store.saves if message else ():
            part = slice(block * 4, block * 4 + 4)
            self.store.known.setdefault(block_hash, [array[part].copy() for array in self.arrays])
        if message:
            self.store.saves.clear()

    @property
    def wants_layers(self):
        return bool(self.store.layered)

    def wait_layer(self, layer, *, budget_s):
        for ticket in self.store.layered:
            self._copy(ticket, [layer])
        return True

    def end_step(self):
        pass

    def poll(self):
        tickets = list(self.store.loads)
        failed = ()
        if tickets and not self.store.failed:
            self.store.failed = tickets[:1]
            self.store.loads.pop(tickets[0])
            failed = (FailedLoad(ticket=tickets[0], num_valid_tokens=0, cause="evicted"),)
        loaded = [ticket for ticket in tickets if ticket in self.store.loads]
        for ticket in loaded:
            if ticket not in self.store.layered:
                self._copy(ticket, range(len(self.arrays)))
            del self.store.loads[ticket]
        self.store.layered = []
        held, self.store.held = self.store.held, []
        return ConnectorReport(loaded=tuple(loaded), failed=failed, released=tuple(held))

    def close(self):
        pass

    def _copy(self, ticket, layers):
        blocks, hashes = self.store.loads[ticket]
        for block, block_hash in zip(blocks, hashes, strict=True):
            for layer in layers:
                self.arrays[layer][block * 4 : block * 4 + 4] = self.store.known[block_hash][layer]


def make(config, context):
    store = Store()
    return ConnectorPair(scheduler=Everything(store), worker=Worker(store))


@hookimpl
def trencadis_kv_connectors():
    yield Component(name="everything", factory=make, summary="Does all that version 1 knows.", interface_version=1)
