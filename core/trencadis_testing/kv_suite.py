"""What the suites of KV connectors share: the connector under test, and whole engines that use it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import pytest

from trencadis.clock import SimulatedClock
from trencadis.engine.engine import Engine
from trencadis.errors import StepFailedError
from trencadis.interfaces import ConnectorPair, KVPool, SupportsMetrics
from trencadis.records import Batch, StepOutput
from trencadis_testing.connector_harness import ConnectorHarness
from trencadis_testing.engines import make_engine
from trencadis_testing.fake_pool import FakeKVCache
from trencadis_testing.fakes import FakeBackend
from trencadis_testing.kv_faults import Fault, Faults, FaultyStore
from trencadis_testing.kv_watch import TransferBooks, watched
from trencadis_testing.workloads import Arrival, Served, serve

__all__ = ["ConnectorSuite", "EngineUnderTest", "again", "twice"]

_NAP_S = 0.001
_LONGEST_STEP_S = 0.05
_PATIENCE_S = 60.0


class ConnectorSuite:
    """Base of the suites; see :class:`trencadis_testing.kv_connector.KVConnectorConformance`."""

    block_size: int = 4
    loads_again: bool = True
    has_threads: bool = False

    @property
    def clock(self) -> SimulatedClock:
        """Clock of the engines, and of the connectors that the command line names; a new one in each test."""
        clock: SimulatedClock = self.__dict__.setdefault("_clock", SimulatedClock())
        return clock

    def make(self) -> ConnectorPair:
        """Return a new pair whose store is empty."""
        raise NotImplementedError(f"{type(self).__name__} needs a method make(self) that returns a ConnectorPair")

    def kv_cache(self, arrays: tuple[Any, ...]) -> KVPool:
        """Return what ``register`` is given; override it to wrap the arrays as your backend's cache does.

        Args:
            arrays: Writable NumPy arrays ``[num_blocks * block_size]`` of 8-byte integers, which a view must share.
        """
        return FakeKVCache(arrays, block_size=self.block_size)

    def settle(self, pair: ConnectorPair) -> None:
        """Wait for transfers on threads of the connector's own; called after every step.

        By default at once; if ``has_threads``, a moment, or until the worker side's ``wait_idle(timeout_s)`` says that they are done,
        but no longer than a stalled one may hold up a step.
        """
        wait_idle = getattr(pair.worker, "wait_idle", None)
        if self.has_threads and wait_idle is not None:
            wait_idle(_LONGEST_STEP_S)
        elif self.has_threads:
            time.sleep(_NAP_S)

    def rest(self, pair: ConnectorPair) -> None:
        """Wait until nothing is saved any more: by ``wait_idle``, else until the connector counts no more for a while."""
        wait_idle = getattr(pair.worker, "wait_idle", None)
        if self.has_threads and wait_idle is not None:
            wait_idle(_PATIENCE_S)
            return
        quiet, before, until_s = 0, "", time.monotonic() + _PATIENCE_S
        while self.has_threads and quiet < 5 and time.monotonic() < until_s:
            time.sleep(5 * _NAP_S)
            now = pair.scheduler.metrics() if isinstance(pair.scheduler, SupportsMetrics) else ""
            quiet = quiet + 1 if now == before else 0
            before = now

    def lose(self, pair: ConnectorPair) -> None:
        """Lose what is stored, behind the connector's back; override it for one that ``store_connector`` did not make."""
        faults = self.__dict__.get("_faults", {}).get(id(pair))
        if faults is None:
            pytest.skip(f"{type(self).__name__} has no method lose(self, pair)")
        faults.begin(Fault.GONE, calls={"get"})

    def teardown_method(self) -> None:
        """Close every connector that a test made."""
        for pair in self.__dict__.pop("_made", ()):
            pair.scheduler.close()
            pair.worker.close()

    def make_one(self, faults: Faults | None = None) -> ConnectorPair:
        """Return a new pair, closed when the test is over.

        Args:
            faults: Faults of its store, where ``store_connector`` made it.
        """
        pair, faults = self.make(), faults or Faults()
        with_stores = getattr(pair, "with_stores", None)
        if with_stores is not None:
            pair = with_stores(lambda store: FaultyStore(store, faults))
            self.__dict__.setdefault("_faults", {})[id(pair)] = faults
        self.__dict__.setdefault("_made", []).append(pair)
        return pair

    def harness(self) -> ConnectorHarness:
        """Return a new connector over a cache of its own."""
        pair = self.make_one()
        return ConnectorHarness(
            pair,
            block_size=self.block_size,
            cache=self.kv_cache,
            settle=lambda: self.settle(pair),
            patience_s=_PATIENCE_S if self.has_threads else 0.0,
        )

    @contextmanager
    def engine(
        self, pair: ConnectorPair | None = None, *, num_blocks: int = 60, eos: int = 0, **options: Any
    ) -> Iterator[EngineUnderTest]:
        """Yield an engine on a fake backend with a connector; at the end, nothing that it recovered from stays hidden.

        Args:
            pair: The connector; a new one if none.
            num_blocks: KV blocks.
            eos: End-of-sequence token; -1 for none.
            options: See :func:`trencadis_testing.engines.make_engine`.

        Raises:
            AssertionError: A sequence read what is not its own, or a transfer id has no end or two.
        """
        pair = pair or self.make_one()
        between, books = watched(pair)
        backend = _Wrapped(self, eos=eos, max_model_len=num_blocks * self.block_size, block_size=self.block_size)
        given = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "warmup": False, **options}
        engine = make_engine(
            connector=between,
            backend=backend,
            clock=self.clock,
            num_blocks=num_blocks,
            block_size=self.block_size,
            **given,
        )
        try:
            yield EngineUnderTest(
                engine=engine,
                clock=self.clock,
                books=books,
                settle=lambda: self.settle(pair),
                rest=lambda: self.rest(pair),
            )
        finally:
            engine.close()
            pair.worker.close()
        assert backend.faults == [], "the engine recovered, but a sequence read what is not its own"
        assert books.faults() == []


@attrs.frozen(kw_only=True)
class EngineUnderTest:
    """An engine with a connector, and what is known of both.

    Attributes:
        engine: The engine.
        clock: Clock of the engine.
        books: About the connector's transfer ids.
        settle: Method ``settle`` of the suite.
        rest: Method ``rest`` of the suite.
    """

    engine: Engine
    clock: SimulatedClock
    books: TransferBooks
    settle: Callable[[], None]
    rest: Callable[[], None]

    def serve(
        self, todo: Sequence[Arrival], *, abort_every: int = 0, after_step: Callable[[], None] = lambda: None
    ) -> Served:
        """Serve a workload to its end; see :func:`trencadis_testing.workloads.serve`."""

        def settled() -> None:
            self.settle()
            after_step()

        return serve(self.engine, self.clock, todo, abort_every=abort_every, after_step=settled)


class _Wrapped(FakeBackend):
    """Shows its cache as the suite says, and remembers why steps failed: the engine computes lost tokens again."""

    def __init__(self, suite: ConnectorSuite, **options: Any) -> None:
        super().__init__(**options)
        self._suite = suite
        self.faults: list[str] = []

    def _run(self, batch: Batch) -> StepOutput:
        try:
            return super()._run(batch)
        except StepFailedError as error:
            self.faults.append(str(error))
            raise

    def kv_cache(self) -> Any:
        return self._suite.kv_cache(tuple(super().kv_cache()))


def again(todo: Sequence[Arrival], *, after: int = 0, mark: str = "again") -> list[Arrival]:
    """Return the same prompts under other names, so many steps later. Pure."""
    return [Arrival(after + a.step, attrs.evolve(a.request, request_id=f"{a.request.request_id} {mark}")) for a in todo]


def twice(todo: Sequence[Arrival]) -> list[Arrival]:
    """Return a workload, and the same prompts once more after it. Pure."""
    return [*todo, *again(todo, after=max(arrival.step for arrival in todo) + 40)]
