"""Drives both sides of a KV connector by hand, without an engine: what the suite looks at call by call."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from trencadis.interfaces import ConnectorPair, Lookup, SupportsLayerwise
from trencadis.records import ConnectorReport, Request

__all__ = ["ConnectorHarness", "hashes_of", "request_of"]

_MAX_STEPS = 300


def hashes_of(numbers: Iterable[int]) -> list[bytes]:
    """Return the hashes of blocks with these numbers. Pure."""
    return [hashlib.blake2b(f"block {number}".encode(), digest_size=32).digest() for number in numbers]


def request_of(hashes: Sequence[bytes], number: int = 0, *, block_size: int = 4) -> Request:
    """Return a request with a prompt of as many full blocks, and one token more. Pure."""
    tokens = range(1, len(hashes) * block_size + 2)
    return Request(request_id=f"request {number} of {len(hashes)}", prompt_token_ids=tuple(tokens))


class ConnectorHarness:
    """A connector over a cache of its own, whose blocks hold noise.

    Args:
        pair: The connector.
        block_size: Tokens per block.
        cache: From three arrays ``[num_blocks * block_size]`` to what ``register`` is given.
        settle: Called after every step.
        patience_s: Real time that whatever is awaited may take on threads of the connector's own.

    Attributes:
        pair: The connector.
        num_blocks: Number of blocks of the cache.
        num_valid_tokens: Number of valid tokens of the last load that failed.
        as_waited: Contents of each layer of the blocks of the last layer-wise load when it had been waited for.
    """

    def __init__(
        self,
        pair: ConnectorPair,
        *,
        block_size: int,
        cache: Callable[[tuple[Any, ...]], Any],
        settle: Callable[[], None],
        patience_s: float = 0.0,
    ) -> None:
        self.pair = pair
        self.num_blocks = 16
        self.num_valid_tokens = 0
        self.as_waited: dict[int, list[list[int]]] = {}
        self._block_size = block_size
        self._settle = settle
        self._patience_s = patience_s
        self._noise = np.random.default_rng(0)
        size = self.num_blocks * block_size
        self._arrays = (np.zeros(size, np.uint64), np.zeros(size, np.int64), np.zeros(size, np.int64))
        self._num_requests = 0
        self.scribble()
        pool = cache(self._arrays)
        pair.scheduler.on_ready(pool.layout)
        pair.worker.register(pool)

    def scribble(self) -> None:
        """Overwrite the whole cache with new noise."""
        for array in self._arrays:
            array[:] = self._noise.integers(0, 2**60, len(array)).astype(array.dtype)

    def contents(self, blocks: Iterable[int]) -> list[list[list[int]]]:
        """Return what the blocks hold, array by array."""
        size = self._block_size
        return [[array[block * size : (block + 1) * size].tolist() for array in self._arrays] for block in blocks]

    def step(self) -> ConnectorReport:
        """Carry one message over and its report back."""
        worker, scheduler = self.pair.worker, self.pair.scheduler
        worker.begin_step(scheduler.take_message())
        worker.end_step()
        self._settle()
        report = worker.poll()
        scheduler.on_report(report)
        return report

    def until(self, done: Callable[[ConnectorReport], bool]) -> bool:
        """Step until a report is as asked for; False if it never is."""
        return any(done(self.step()) for _ in self._tries())

    def save(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> list[list[list[int]]]:
        """Offer blocks for saving, and overwrite the cache one step later, as an engine may; returns what they held."""
        contents = self.contents(blocks)
        self.pair.scheduler.on_computed(blocks=list(blocks), block_hashes=list(hashes))
        self.step()
        self.scribble()
        self.step()
        return contents

    def save_by_layer(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> list[list[list[int]]]:
        """Do the same to a worker side that may copy while a step is computed: each layer is overwritten as soon as it may be."""
        worker, scheduler, contents = self.pair.worker, self.pair.scheduler, self.contents(blocks)
        scheduler.on_computed(blocks=list(blocks), block_hashes=list(hashes))
        worker.expect_layers()
        worker.begin_step(scheduler.take_message())
        for layer, array in enumerate(self._arrays if worker.wants_layers else ()):
            worker.wait_layer(layer, budget_s=0.0)
            array[:] = self._noise.integers(0, 2**60, len(array)).astype(array.dtype)
        self.scribble()
        worker.end_step()
        self._settle()
        scheduler.on_report(worker.poll())
        self.step()
        return contents

    def lookup(self, hashes: Sequence[bytes], *, num_blocks: int = 0) -> Lookup:
        """Ask for a prompt until the answer is not ``pending``.

        Args:
            hashes: Hashes of its full blocks.
            num_blocks: Blocks that were saved: with a connector that has threads, asked again until so many are found.

        Raises:
            AssertionError: It always is.
        """
        until_s = time.monotonic() + self._patience_s
        found = self._ask(hashes)
        while found.num_tokens < num_blocks * self._block_size and time.monotonic() < until_s:
            self.step()
            found = self._ask(hashes)
        return found

    def _ask(self, hashes: Sequence[bytes]) -> Lookup:
        self._num_requests += 1
        request = request_of(hashes, self._num_requests, block_size=self._block_size)
        for _ in self._tries():
            found = self.pair.scheduler.lookup(request, block_hashes=tuple(hashes), num_local_tokens=0)
            if not found.pending:
                return found
            self.step()
        raise AssertionError(f"lookup() answers pending, {_MAX_STEPS} times in a row")

    def load(self, transfer_id: int, blocks: Sequence[int], hashes: Sequence[bytes]) -> str:
        """Load into blocks; returns why it failed, or an empty string.

        Raises:
            AssertionError: It is neither loaded nor failed.
        """
        self.pair.scheduler.on_allocated(transfer_id, blocks=list(blocks), block_hashes=list(hashes))
        for _ in self._tries():
            report = self.step()
            if transfer_id in report.loaded:
                return ""
            for failed in report.failed:
                if failed.transfer_id == transfer_id:
                    self.num_valid_tokens = failed.num_valid_tokens
                    return failed.cause or "failed"
        raise AssertionError(f"load {transfer_id} neither arrives nor fails in {_MAX_STEPS} steps")

    def load_by_layer(
        self, transfer_id: int, blocks: Sequence[int], hashes: Sequence[bytes], *, budget_s: float
    ) -> tuple[list[int], ConnectorReport]:
        """Load into blocks as a step does whose layers wait.

        Returns:
            The layers that did not come, and the report of the step.
        """
        worker, scheduler = self.pair.worker, self.pair.scheduler
        scheduler.on_allocated(transfer_id, blocks=list(blocks), block_hashes=list(hashes))
        if not isinstance(scheduler, SupportsLayerwise):
            raise AssertionError("lookup() says layerwise, and the scheduler side does not inherit SupportsLayerwise")
        scheduler.on_layerwise(transfer_id)
        worker.begin_step(scheduler.take_message())
        missed = [] if worker.wants_layers else list(range(len(self._arrays)))
        for layer in range(len(self._arrays)) if worker.wants_layers else ():
            self.as_waited[layer] = []
            if not worker.wait_layer(layer, budget_s=budget_s):
                missed.append(layer)
            self.as_waited[layer] = [contents[layer] for contents in self.contents(blocks)]
        worker.end_step()
        report = worker.poll()
        scheduler.on_report(report)
        return missed, report

    def _tries(self) -> Iterator[int]:
        until_s = time.monotonic() + self._patience_s
        return itertools.takewhile(lambda n: n < _MAX_STEPS or time.monotonic() < until_s, itertools.count())
