"""Conformance suite of KV connectors that provide ``kv_connector.ranks``: worker sides in other processes, one for each rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from trencadis.interfaces import ConnectorPair, KVPool, SupportsRemoteScheduler, SupportsRemoteWorkers
from trencadis.interfaces.rank_quorum import RankQuorum
from trencadis.records import ConnectorReport, KVLayout, KVPart, Request
from trencadis_testing.connector_harness import hashes_of, request_of
from trencadis_testing.kv_suite import ConnectorSuite

__all__ = ["LAYOUTS", "KVRanksConformance", "RankPool", "RankedEngine", "held_layouts"]

_NUM_BLOCKS, _BLOCK_SIZE, _NUM_LAYERS, _HEAD_DIM = 16, 4, 4, 3
_MAX_STEPS = 20_000

LAYOUTS = {
    "one rank": (4, 1, 1),
    "heads over two": (4, 2, 1),
    "heads over four": (4, 4, 1),
    "each head on two": (2, 4, 1),
    "every head on both": (1, 2, 1),
    "layers over two": (4, 1, 2),
    "layers and heads over two": (4, 2, 2),
}
"""KV heads of the model, ``[parallel] tensor`` and ``pipeline``."""


def held_layouts(num_heads: int, tensor: int, pipeline: int) -> list[KVLayout]:
    """Return what each rank holds of a block of a model with four layers. Pure."""
    held = max(1, num_heads // tensor)
    copies = max(1, tensor // num_heads)
    size = _NUM_LAYERS // pipeline
    return [
        KVLayout(
            parts=tuple(
                KVPart(layer=layer, kind=kind, num_heads=held, head_dim=_HEAD_DIM, dtype="uint16", item_bytes=2)
                for kind in ("key", "value")
                for layer in range(stage * size, stage * size + size)
            ),
            block_size=_BLOCK_SIZE,
            first_head=rank // copies * held,
            last_head=rank // copies * held + held,
            numerics="fake",
        )
        for stage in range(pipeline)
        for rank in range(tensor)
    ]


class RankPool(KVPool):
    """Blocks of one rank, in host memory.

    Args:
        layout: Layout of the parts that it holds.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self.rows = np.zeros((_NUM_BLOCKS, layout.block_bytes), np.uint8)

    @property
    def layout(self) -> KVLayout:
        """The given layout."""
        return self._layout

    def read_blocks(self, blocks: Sequence[int], out: NDArray[np.uint8]) -> None:
        """Copy."""
        out[:] = self.rows[list(blocks)]

    def write_blocks(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Copy."""
        self.rows[list(blocks)] = data

    def fill(self, block: int, number: int) -> None:
        """Put this rank's part of the content with a number into a block."""
        self.rows[block] = content_of(self._layout, number)


def content_of(layout: KVLayout, number: int) -> NDArray[np.uint8]:
    """Return a rank's part of the block with a number: each entry tells layer, kind, token, head and place. Pure."""
    pieces = []
    for part in layout.parts:
        shape = (_BLOCK_SIZE, part.num_heads, part.head_dim)
        token, head, place = np.indices(shape)
        code = number * 2 + (part.kind == "value")
        for base, value in (
            (_NUM_LAYERS, part.layer),
            (_BLOCK_SIZE, token),
            (8, head + layout.first_head),
            (_HEAD_DIM, place),
        ):
            code = code * base + value
        pieces.append(np.broadcast_to(code, shape).astype(np.uint16).reshape(-1).view(np.uint8))
    return np.concatenate(pieces)


class RankedEngine:
    """A scheduler side, and a worker side for each rank over a pool of its own, driven by hand.

    Args:
        suite: Makes the connectors, and waits for them.
        layouts: Layout that each rank holds.
    """

    def __init__(self, suite: ConnectorSuite, layouts: Sequence[KVLayout]) -> None:
        self._suite = suite
        self.layouts = layouts
        self.pair = suite.make_one()
        self._num_requests = 0
        self.lose_ranks()
        side = self.pair.scheduler
        assert isinstance(side, SupportsRemoteWorkers), "its scheduler side does not inherit SupportsRemoteWorkers"
        side.on_ranks(layouts)
        side.on_ready(layouts[-1])

    def lose_ranks(self) -> None:
        """Start with new ranks, as after their processes have ended: with worker sides of their own, and noise in their blocks."""
        self.workers: list[ConnectorPair] = []
        self.pools = [RankPool(layout) for layout in self.layouts]
        self._quorum = RankQuorum(len(self.layouts))
        for rank, pool in enumerate(self.pools):
            made = self._suite.make_one()
            made.worker.register(pool)
            assert isinstance(made.worker, SupportsRemoteScheduler), (
                "its worker side does not inherit SupportsRemoteScheduler"
            )
            made.worker.on_ranks(self.layouts, rank=rank)
            self.workers.append(made)
        self.scribble()

    def scribble(self) -> None:
        """Overwrite all blocks with noise."""
        noise = np.random.default_rng(len(self.workers))
        for pool in self.pools:
            pool.rows[:] = noise.integers(0, 256, pool.rows.shape, np.uint8)

    def step(self, *, without: Sequence[int] = ()) -> ConnectorReport:
        """Carry a message to the ranks, and their reports back; some ranks do not get it."""
        side, message = self.pair.scheduler, self.pair.scheduler.take_message()
        assert isinstance(side, SupportsRemoteWorkers)
        reports = {}
        for rank, made in enumerate(self.workers):
            made.worker.begin_step(b"" if rank in without else message)
            made.worker.end_step()
        for rank, made in enumerate(self.workers):
            self._suite.settle(made)
            reports[rank] = made.worker.poll()
        for rank, report in reports.items():
            for own in report.messages:
                side.on_worker_message(rank, own)
        merged = self._quorum.merge(reports, is_awaited=lambda _: True, is_pinned=lambda _: True)
        side.on_report(merged)
        return merged

    def save(self, numbers: Sequence[int], *, without: Sequence[int] = ()) -> None:
        """Have blocks 0, 1 … with contents of these numbers saved; some ranks save nothing."""
        for block, number in enumerate(numbers):
            for pool in self.pools:
                pool.fill(block, number)
        self.pair.scheduler.on_computed(blocks=list(range(len(numbers))), block_hashes=hashes_of(numbers))
        self.step(without=without)
        self.scribble()
        for made in self.workers:
            self._suite.rest(made)
        self.step()

    def find(self, numbers: Sequence[int]) -> tuple[int, int]:
        """Return how many leading blocks can be loaded, and the transfer id."""
        self._num_requests += 1
        request: Request = request_of(hashes_of(numbers), self._num_requests, block_size=_BLOCK_SIZE)
        for _ in range(_MAX_STEPS):
            found = self.pair.scheduler.lookup(request, block_hashes=hashes_of(numbers), num_local_tokens=0)
            if not found.pending:
                return found.num_tokens // _BLOCK_SIZE, found.transfer_id
            self.step()
        raise AssertionError(f"lookup() answers pending, {_MAX_STEPS} times in a row")

    def load(self, transfer_id: int, numbers: Sequence[int], blocks: Sequence[int]) -> int:
        """Load into blocks; returns how many leading ones are there on all ranks.

        Raises:
            AssertionError: A load ends nowhere, or a block that is said to be there has other bytes.
        """
        self.pair.scheduler.on_allocated(transfer_id, blocks=list(blocks), block_hashes=hashes_of(numbers))
        for _ in range(_MAX_STEPS):
            report = self.step()
            failed = [one for one in report.failed if one.transfer_id == transfer_id]
            if failed or transfer_id in report.loaded:
                number = failed[0].num_valid_tokens // _BLOCK_SIZE if failed else len(numbers)
                self.check(numbers[:number], blocks)
                return number
        raise AssertionError(f"load {transfer_id} ends on no rank, or not on all, in {_MAX_STEPS} steps")

    def check(self, numbers: Sequence[int], blocks: Sequence[int]) -> None:
        """Compare blocks of every rank with the contents of these numbers."""
        for rank, pool in enumerate(self.pools):
            for block, number in zip(blocks, numbers, strict=False):
                held = f"rank {rank}, heads {pool.layout.first_head} to {pool.layout.last_head - 1}, layers {pool.layout.layers}"
                assert pool.rows[block].tobytes() == content_of(pool.layout, number).tobytes(), (
                    f"{held}: block {block} has not the bytes that were saved"
                )


class KVRanksConformance(ConnectorSuite):
    """Tests of a KV connector whose worker sides run in the processes of ranks; inherit from it, and set ``make``.

    Every rank holds some layers and heads of each block, some ranks the same ones. ``make`` is called for the engine and for each rank, as
    their processes do: what it returns in one test has one config.

    Attributes:
        outlives_ranks: Whether saved blocks can be loaded after all ranks were started again; False: each has its own memory.
    """

    has_threads: bool = True
    outlives_ranks: bool = True

    @pytest.mark.parametrize("name", LAYOUTS)
    def test_what_ranks_saved_is_loaded_bit_for_bit_on_each(self, name: str) -> None:
        """The range of heads and the layers are part of what is loaded."""
        engine = RankedEngine(self, held_layouts(*LAYOUTS[name]))
        engine.save([1, 2, 3])
        number, transfer_id = engine.find([1, 2, 3])
        assert number == 3, f"3 blocks were saved on all ranks, {number} can be loaded"
        assert engine.load(transfer_id, [1, 2, 3], [9, 4, 7]) == 3, "the load failed"

    @pytest.mark.parametrize("name", ["heads over two", "layers over two"])
    def test_block_that_a_rank_did_not_save_is_loaded_nowhere(self, name: str) -> None:
        """Half of a block is of no use; what a look-up claims all the same fails to load."""
        engine = RankedEngine(self, held_layouts(*LAYOUTS[name]))
        engine.save([1])
        engine.save([2], without=[1])
        number, transfer_id = engine.find([1, 2])
        assert number, "the block that all ranks have cannot be loaded"
        assert engine.load(transfer_id, [1, 2][:number], [5, 6]) == 1

    def test_ranks_that_are_started_again_load_what_is_there_and_nothing_else(self) -> None:
        """Their worker sides know nothing; the scheduler side is the same."""
        engine = RankedEngine(self, held_layouts(*LAYOUTS["heads over two"]))
        engine.save([1, 2])
        engine.lose_ranks()
        engine.step()
        number, transfer_id = engine.find([1, 2])
        assert number == (2 if self.outlives_ranks else 0)
        if number:
            assert engine.load(transfer_id, [1, 2], [3, 8]) == 2
        engine.save([3, 4])
        number, transfer_id = engine.find([3, 4])
        assert number == 2, "new ranks do not save"
        assert engine.load(transfer_id, [3, 4], [10, 11]) == 2

    def test_what_ranks_do_is_counted_once(self) -> None:
        """Tokens are those of the text, whatever the number of ranks."""
        counts = []
        for name in ("one rank", "each head on two"):
            engine = RankedEngine(self, held_layouts(*LAYOUTS[name]))
            engine.save([1, 2])
            metrics = getattr(engine.pair.scheduler, "metrics", str)()
            counts.append([line for line in metrics.splitlines() if line.startswith("trencadis_kv_tokens_total")])
        assert counts[0] == counts[1]
