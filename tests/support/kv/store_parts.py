"""Parts of a connector over a store, for tests of one of them: a layout, a pool, books and stores that wait for each other."""

from __future__ import annotations

import hashlib
import threading

import numpy as np

from trencadis.clock import SimulatedClock
from trencadis.errors import TransferError
from trencadis_kv.store.breaker import Breaker
from trencadis_kv.store.counters import TransferCounters
from trencadis_kv.store.defaults import IdentityCodec, NoLongerThanComputing
from trencadis_kv.store.parts import StoreParts
from trencadis_kv.store.settings import StoreSettings
from trencadis_testing.fake_pool import FakeKVCache
from trencadis_testing.kv_faults import DictStore

BLOCK_SIZE = 4
BLOCK_BYTES = 2 * BLOCK_SIZE * 8


def make_pool(num_blocks=16):
    noise = np.random.default_rng(1)
    arrays = [noise.integers(0, 2**60, num_blocks * BLOCK_SIZE) for _ in range(2)]
    return FakeKVCache(arrays, block_size=BLOCK_SIZE)


def read(pool, blocks):
    out = np.empty((len(blocks), BLOCK_BYTES), np.uint8)
    pool.read_blocks(blocks, out)
    return out


def hashes_of(*numbers):
    return [hashlib.blake2b(str(number).encode(), digest_size=32).digest() for number in numbers]


def make_parts(make_store=None, *, codec=None, policy=None, clock=None, **settings):
    clock = clock or SimulatedClock()
    objects = {}
    chosen = StoreSettings(**{"close_timeout_s": 1.0, **settings})
    return StoreParts(
        name="shelf",
        settings=chosen,
        clock=clock,
        identity="model",
        make_store=make_store or (lambda: DictStore(objects)),
        codec=codec or IdentityCodec(),
        policy=policy or NoLongerThanComputing(),
        counters=TransferCounters("shelf"),
        breaker=Breaker(
            clock,
            name="shelf",
            failure_limit=chosen.failure_limit,
            failure_window_s=chosen.failure_window_s,
            cooldown_s=chosen.cooldown_s,
        ),
    )


class GatedStore(DictStore):
    """A dictionary whose calls wait at a gate, until it opens or they are interrupted.

    Attributes:
        is_waiting: Set while any call waits at the gate.
        num_waiting: Calls that do, one of each thread at most.
        calls: Names of the calls that came.
    """

    def __init__(self, objects, *, gate=None):
        super().__init__(objects)
        self.gate = gate or threading.Event()
        self.is_waiting = threading.Event()
        self.calls = []
        self.num_waiting = 0
        self._interrupted = False
        self._changed = threading.Condition()

    def open(self):
        self.gate.set()
        self.interrupt_waiters(interrupted=False)

    def contains(self, keys):
        self._pass("contains")
        return super().contains(keys)

    def get(self, keys, targets):
        self._pass("get")
        return super().get(keys, targets)

    def put(self, keys, objects):
        self._pass("put")
        return super().put(keys, objects)

    def delete(self, keys):
        self._pass("delete")
        super().delete(keys)

    def interrupt(self):
        self.interrupt_waiters(interrupted=True)

    def interrupt_waiters(self, *, interrupted):
        with self._changed:
            self._interrupted = self._interrupted or (interrupted and self.is_waiting.is_set())
            self._changed.notify_all()

    def _pass(self, call):
        self.calls.append(call)
        with self._changed:
            self.num_waiting += 1
            self.is_waiting.set()
            arrived = self._changed.wait_for(lambda: self.gate.is_set() or self._interrupted, 20.0)
            self.num_waiting -= 1
            if not self.num_waiting:  # while another one waits, it can be interrupted
                self.is_waiting.clear()
            was_interrupted, self._interrupted = self._interrupted, False
        assert arrived, "nobody opened the gate"
        if was_interrupted:
            raise TransferError(f"{call} was interrupted", cause="unreachable")


class OnlyBackendThread:
    """A pool that only one thread may touch; it fails whoever is another."""

    any_thread = False

    def __init__(self, pool):
        self._pool = pool
        self._owner = threading.get_ident()

    @property
    def layout(self):
        return self._pool.layout

    def read_blocks(self, blocks, out):
        assert threading.get_ident() == self._owner
        self._pool.read_blocks(blocks, out)

    def write_blocks(self, blocks, data):
        assert threading.get_ident() == self._owner
        self._pool.write_blocks(blocks, data)
