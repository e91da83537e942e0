"""Loads from a store of known blocks into a pool whose every block is compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from support.kv.store_parts import BLOCK_BYTES, GatedStore, hashes_of, make_parts, make_pool, read
from trencadis_kv.store.loads import Loads
from trencadis_kv.store.messages import LoadOrder
from trencadis_kv.store.shards import RankShard
from trencadis_testing.kv_faults import DictStore

__all__ = ["CONTENTS", "House", "flip", "houses"]

CONTENTS = {i: np.random.default_rng(i).integers(0, 256, BLOCK_BYTES, np.uint8) for i in range(9)}
"""Bytes of the blocks that are stored, by their number."""


class House:
    """Loads from a store that has blocks 0 to 8, each with its own content.

    Args:
        gated: Calls of the store wait until it is opened.
        pool: Where blocks go; one of random blocks, if none.
        chunk: Blocks that are asked for at once.
        codec: Of the objects.
        settings: Of the connector.

    Attributes:
        objects: What is stored, by key.
        before: Bytes of all blocks before any load.
    """

    def __init__(self, *, gated=False, pool=None, chunk=2, codec=None, **settings):
        self.objects = {}
        self.store = GatedStore(self.objects) if gated else DictStore(self.objects)
        self.parts = make_parts(lambda: self.store, codec=codec, **settings)
        self.pool = pool or make_pool()
        self.packing = self.parts.objects(self.pool.layout)
        for number, content in CONTENTS.items():
            (key,), (block_hash,) = self.keys(number), hashes_of(number)
            self.objects[key] = b"".join(self.packing.pack(block_hash, memoryview(content)))
        self.loads = Loads(self.parts, self.pool, [RankShard(objects=self.packing)])
        self.loads.chunk = chunk
        self.before = read(self.pool, range(16))

    def keys(self, *numbers):
        """Return keys of stored blocks."""
        return self.packing.keys(hashes_of(*numbers))

    def start(self, transfer_id, *, blocks, numbers):
        """Have stored blocks loaded."""
        self.loads.start(LoadOrder(transfer_id, list(blocks), hashes_of(*numbers)))

    def settle(self):
        """Wait until no thread works."""
        assert self.parts.activity.wait_idle(60.0)

    def report(self):
        """Wait, and return what has ended."""
        self.settle()
        return self.loads.poll()

    def spoil(self, number, change):
        """Change what is stored of a block."""
        data = bytearray(self.objects[self.keys(number)[0]])
        change(data)
        self.objects[self.keys(number)[0]] = bytes(data)

    def check(self, expected):
        """Check that blocks hold contents, and that all others are as they were."""
        now = read(self.pool, range(16))
        for block in range(16):
            right = CONTENTS[expected[block]] if block in expected else self.before[block]
            assert (now[block] == right).all(), f"block {block}"

    def failures(self, cause):
        """Return how many transfers failed for a cause."""
        return self.parts.counters.value("transfer_failures_total", cause=cause)


def flip(position):
    """Return a change of one bit of a byte."""

    def change(data):
        data[position] ^= 1

    return change


@contextlib.contextmanager
def houses() -> Iterator[Callable[..., House]]:
    """Give what makes houses; when the block ends, nothing of them may still be at work."""
    made = []

    def make(**options):
        made.append(House(**options))
        return made[-1]

    yield make
    for one in made:
        if isinstance(one.store, GatedStore):
            one.store.open()
        one.loads.close(5.0)
        assert one.parts.activity.wait_idle(60.0), "work is counted that nobody does"
