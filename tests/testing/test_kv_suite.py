from __future__ import annotations

import attrs
import pytest

from trencadis.interfaces import ConnectorPair, SupportsMetrics
from trencadis_testing.doubles import LoopConnector, _LoopScheduler, _LoopWorker
from trencadis_testing.kv_suite import ConnectorSuite, twice
from trencadis_testing.workloads import arrivals


class Loop(ConnectorSuite):
    def __init__(self, **options):
        self.options = options
        self.made: list[ConnectorPair] = []

    def make(self):
        self.made.append(LoopConnector(**self.options).pair())
        return self.made[-1]


class Closed:
    """Counts how often each side of a pair is closed."""

    def __init__(self, pair: ConnectorPair) -> None:
        self.closed: list[str] = []
        for name in ("scheduler", "worker"):
            side = getattr(pair, name)
            side.close = lambda name=name: self.closed.append(name)


def test_every_connector_is_closed_when_a_test_is_over():
    suite = Loop()
    pairs = [suite.make_one(), suite.harness().pair]
    counts = [Closed(pair) for pair in pairs]
    suite.teardown_method()
    suite.teardown_method()
    assert [one.closed for one in counts] == [["scheduler", "worker"]] * 2


def test_engine_whose_cache_was_spoiled_is_a_failed_test_although_it_recovered():
    class Spoils(_LoopWorker):
        def poll(self):
            for array in self._arrays:
                array[: self._block_size] = 1
            return super().poll()

    store = LoopConnector().store
    suite = Loop()
    pair = ConnectorPair(scheduler=LoopConnector().scheduler, worker=Spoils(store, 4))
    with pytest.raises(AssertionError, match="read what is not its own"), suite.engine(pair) as one:
        one.serve(arrivals(3, num_requests=4))


def test_transfer_id_that_ends_twice_is_a_failed_test():
    class Twice(_LoopWorker):
        def poll(self):
            report = super().poll()
            return attrs.evolve(report, loaded=report.loaded * 2)

    right = LoopConnector()
    pair = ConnectorPair(scheduler=right.scheduler, worker=Twice(right.store, 4))
    with pytest.raises(AssertionError, match="loaded, loaded"), Loop().engine(pair, prefix_caching=False) as one:
        one.serve(twice(arrivals(4, num_requests=3)))


def test_losing_what_is_stored_needs_a_store_or_a_method():
    suite = Loop()
    with pytest.raises(pytest.skip.Exception, match="no method lose"):
        suite.lose(suite.make_one())


def test_threads_are_waited_for_as_the_connector_says():
    pair, waits = LoopConnector().pair(), []
    pair.worker.wait_idle = waits.append  # type: ignore[attr-defined]
    suite = Loop()
    suite.settle(pair)
    suite.rest(pair)
    assert waits == []
    suite.has_threads = True
    suite.settle(pair)
    suite.rest(pair)
    assert len(waits) == 2
    assert waits[0] < waits[1]


def test_connector_that_tells_nothing_is_at_rest_once_it_counts_no_more():
    texts = iter(["1", "2", *["3"] * 9])

    class Counts(_LoopScheduler, SupportsMetrics):
        def metrics(self) -> str:
            return next(texts)

    one = LoopConnector()
    pair = ConnectorPair(scheduler=Counts(one.store, 4), worker=one.worker)
    suite = Loop()
    suite.has_threads = True
    suite.settle(pair)
    suite.rest(pair)
    assert len(list(texts)) == 3
