"""The worker prepares the next batch before the engine takes Python's lock for what it does behind the last one."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from trencadis.interfaces import AllocationPlan
from trencadis.records import Batch, ModelSource, TableWrites
from trencadis_plugins.executor import inline
from trencadis_plugins.executor.inline import InlineExecutor
from trencadis_testing.fakes import FakeBackend

NONE = np.empty(0, np.int32)
PLAN = AllocationPlan(num_blocks=16, block_size=4, num_rows=4, max_model_len=40, max_num_batched_tokens=32)


class Gated(FakeBackend):
    """Runs each batch when its gate is open."""

    def __init__(self):
        super().__init__()
        self.gates = [threading.Event() for _ in range(2)]

    def submit(self, batch):
        assert self.gates[batch.step].wait(60)
        return super().submit(batch)


class House:
    """An executor whose batches take so long, by its clock; notes the head starts that it gives."""

    def __init__(self, monkeypatch, took_s):
        self.head_starts = []
        times = itertools.count(0.0, took_s)
        monkeypatch.setattr(
            inline, "time", SimpleNamespace(sleep=self.head_starts.append, perf_counter=lambda: next(times))
        )
        self.backend, self.executor = Gated(), InlineExecutor()
        self.executor.start(
            make_backend=lambda rank: self.backend, make_sampler=lambda rank: None, source=ModelSource(path="fake")
        )
        self.executor.allocate(PLAN)

    def run(self, *, num_batches=2, is_late=False):
        """Submit batches, wait for the first, and return the head starts given until then."""
        gates = self.backend.gates
        steps = [self.executor.submit(_batch(step)) for step in range(num_batches)]
        if is_late:
            gates[0].set()
            steps[0]._future.result(60)
        else:
            threading.Timer(0.05, gates[0].set).start()
        steps[0].wait()
        given = list(self.head_starts)
        gates[1].set()
        for step in steps[1:]:
            step.wait()
        self.executor.close()
        return given


def _batch(step):
    writes = TableWrites(rows=NONE, columns=NONE, block_ids=NONE)
    return Batch(step=step, num_sequences=0, row_starts=(), table_writes=writes, passes=())


@pytest.mark.parametrize(
    ("took_s", "head_starts"), [(0.001, []), (0.004, [0.00025]), (0.025, [0.0005]), (0.2, [0.001])]
)
def test_next_batch_has_a_head_start_that_is_little_of_it(monkeypatch, took_s, head_starts):
    assert House(monkeypatch, took_s).run() == pytest.approx(head_starts)


def test_nothing_is_waited_for_where_there_is_no_next_batch(monkeypatch):
    assert House(monkeypatch, 0.025).run(num_batches=1) == []


def test_engine_that_comes_late_does_not_lose_more_time(monkeypatch):
    """The worker had all the time until then."""
    assert House(monkeypatch, 0.025).run(is_late=True) == []
