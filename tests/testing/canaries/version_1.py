"""A plugin as third parties write it, for version 1 of every interface. It is edited only when a contract gets another version.

This module must load, build and answer. A change of core that breaks it breaks plugins in the field: raise the interface's version, so
that plugins for the earlier one are refused in words, and follow here.
"""

from __future__ import annotations

import attrs
import numpy as np

from trencadis import Component, hookimpl
from trencadis.interfaces import (
    AcceptanceRule,
    Backend,
    BackendCapabilities,
    BucketingStrategy,
    ConnectorPair,
    DraftLength,
    EvictionPolicy,
    Executor,
    KVSchedulerSide,
    KVWorkerSide,
    Lookup,
    Observer,
    Router,
    Sampler,
    SchedulingPolicy,
    Speculator,
)
from trencadis.records import Bucket, ConnectorReport, Drafts
from trencadis_kv.interfaces import KVCodec, KVPolicy


@attrs.frozen(kw_only=True)
class CanaryConfig:
    """Table of the canary."""

    limit: int = attrs.field(default=3, metadata={"help": "A number.", "unit": "birds"})


class CanaryBucketing(BucketingStrategy):
    def __init__(self, config, context):
        self.limit = config.limit

    def buckets(self, limits):
        return ()

    def bucket_for(self, shape):
        return Bucket.of(shape)


class CanaryScheduling(SchedulingPolicy):
    def admit(self, request, *, num_waiting, num_waiting_tokens):
        return "the cage is full" if num_waiting >= 3 else ""

    def order(self, view):
        return view.waiting[::-1]

    def victim(self, view, *, candidates):
        return int(candidates[0])


class CanaryEviction(EvictionPolicy):
    def __init__(self):
        self.candidates = []

    def on_free(self, blocks, *, depths, now_s):
        self.candidates.extend(blocks)

    def on_hit(self, blocks, *, now_s):
        self.forget(blocks)

    def victims(self, num_blocks):
        found, self.candidates = self.candidates[:num_blocks], self.candidates[num_blocks:]
        return found

    def forget(self, blocks):
        self.candidates = [block for block in self.candidates if block not in blocks]


class CanarySampler(Sampler):
    honours = frozenset()

    def allocate(self, *, num_rows, vocab_size, device):
        pass

    def start_row(self, start):
        pass

    def sample(self, logits, context):
        raise NotImplementedError


class CanarySpeculator(Speculator):
    def propose(self, view):
        return Drafts(num_drafts=np.zeros(len(view.slots), np.int32), token_ids=np.zeros(0, np.int32))


class CanaryDraftLength(DraftLength):
    def choose(self, view):
        return view.max_draft_tokens // 2


class CanaryAcceptance(AcceptanceRule):
    lossless = True

    def accept(self, verification):
        return (verification.sampled[:, :-1] == verification.tokens).double()


class CanarySchedulerSide(KVSchedulerSide):
    def lookup(self, request, *, block_hashes, num_local_tokens):
        return Lookup()

    def on_allocated(self, transfer_id, *, blocks, block_hashes):
        pass

    def on_computed(self, *, blocks, block_hashes):
        pass

    def on_finished(self, request, *, blocks):
        return None

    def on_cancelled(self, transfer_id):
        pass

    def take_message(self):
        return b""

    def on_report(self, report):
        pass


class CanaryWorkerSide(KVWorkerSide):
    def register(self, kv_cache):
        pass

    def begin_step(self, message):
        pass

    def end_step(self):
        pass

    def poll(self):
        return ConnectorReport()

    def close(self):
        pass


class CanaryBackend(Backend):
    capabilities = BackendCapabilities(layout="ragged", default_block_size=16)

    def load(self, source, *, sampler):
        raise NotImplementedError

    def memory(self, *, max_num_batched_tokens, max_num_seqs):
        raise NotImplementedError

    def allocate(self, plan):
        pass

    def prepare(self, bucket):
        pass

    def submit(self, batch):
        raise NotImplementedError

    def copy_blocks(self, *, sources, targets):
        pass

    def close(self):
        pass


class CanaryExecutor(Executor):
    capabilities = CanaryBackend.capabilities

    def start(self, *, make_backend, make_sampler, source):
        return make_backend(0).load(source, sampler=make_sampler(0))

    def memory(self, *, max_num_batched_tokens, max_num_seqs):
        raise NotImplementedError

    def allocate(self, plan):
        pass

    def prepare(self, bucket):
        pass

    def submit(self, batch):
        raise NotImplementedError

    def close(self):
        pass


class CanaryCodec(KVCodec):
    flags = 0
    max_growth_bytes = 0

    def encode(self, payload, header):
        return payload

    def decode(self, data, header, out):
        out[:] = data


class CanaryPolicy(KVPolicy):
    def admits_load(self, view):
        return 0.0


class CanaryRouter(Router):
    def peek(self, request, replicas):
        return int(replicas.is_healthy.argmax())


class CanaryObserver(Observer):
    def on_step(self, stats):
        pass

    def on_request(self, finished):
        pass


def _component(make, **more):
    return Component(
        name="canary", factory=lambda config, context: make(), summary="Sings.", interface_version=1, **more
    )


@hookimpl
def trencadis_bucketings():
    yield Component(name="canary", factory=CanaryBucketing, config=CanaryConfig, summary="Sings.", interface_version=1)


@hookimpl
def trencadis_scheduling_policies():
    yield _component(CanaryScheduling, requires={"backend.canary"})


@hookimpl
def trencadis_eviction_policies():
    yield _component(CanaryEviction)


@hookimpl
def trencadis_samplers():
    yield _component(CanarySampler)


@hookimpl
def trencadis_speculators():
    yield _component(CanarySpeculator)


@hookimpl
def trencadis_draft_lengths():
    yield _component(CanaryDraftLength)


@hookimpl
def trencadis_acceptance_rules():
    yield _component(CanaryAcceptance)


@hookimpl
def trencadis_kv_connectors():
    yield _component(lambda: ConnectorPair(scheduler=CanarySchedulerSide(), worker=CanaryWorkerSide()))


@hookimpl
def trencadis_kv_codecs():
    yield _component(CanaryCodec)


@hookimpl
def trencadis_kv_policies():
    yield _component(CanaryPolicy)


@hookimpl
def trencadis_routers():
    yield _component(CanaryRouter)


@hookimpl
def trencadis_backends():
    yield _component(CanaryBackend, provides={"backend.canary"})


@hookimpl
def trencadis_executors():
    yield _component(CanaryExecutor)


@hookimpl
def trencadis_observers():
    yield _component(CanaryObserver)


@hookimpl
def trencadis_configure(config):
    config.bucketing.components["canary"]


@hookimpl
def trencadis_engine_ready(model, plan_hash):
    pass


@hookimpl
def trencadis_engine_closing():
    pass


@hookimpl(trylast=True)
def trencadis_select_backend(candidates):
    return "canary" if "canary" in candidates else None
