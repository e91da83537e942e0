"""The executor suite passes a small correct executor and fails every broken one, each for the right reason."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import attrs
import numpy as np
import pytest

from trencadis.errors import BackendError, StepFailedError
from trencadis.interfaces import BlockCopies, Executor
from trencadis.records import MemoryReport, WarmUpReport
from trencadis_testing import executor as suite_module
from trencadis_testing.executor import ExecutorConformance
from trencadis_testing.fake_executor import FakeExecutor


class Step:
    def __init__(self, future):
        self.future = future

    def wait(self):
        try:
            pending, report = self.future.result()
            output = pending.wait()
        except Exception as error:
            raise StepFailedError(str(error)) from error
        return attrs.evolve(output, connector_reports={} if report is None else {0: report})


class OneThread(Executor):
    """Correct: everything on one worker thread. Each mutant breaks one thing."""

    step = Step

    def __init__(self):
        self.thread = ThreadPoolExecutor(1)
        self.backend = self.connector = self.ins = None

    def call(self, function, *args, **kwargs):
        return self.thread.submit(function, *args, **kwargs).result()

    def start(self, *, make_backend, make_sampler, source):
        self.backend = self.call(make_backend, 0)
        return self.call(self.backend.load, source, sampler=make_sampler(0))

    @property
    def capabilities(self):
        return self.backend.capabilities

    def memory(self, *, max_num_batched_tokens, max_num_seqs):
        return self.backend.memory(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)

    def allocate(self, plan):
        self.call(self.backend.allocate, plan)
        self.connector = plan.connector
        if self.connector is not None:
            self.connector.register(self.backend.kv_cache())

    def prepare(self, bucket):
        self.call(self.backend.prepare, bucket)

    def submit(self, batch):
        return self.step(self.thread.submit(self.run, batch))

    def run(self, batch):
        if self.connector is None:
            return self.backend.submit(batch), None
        self.contained(self.connector.begin_step, batch.connector_message)
        if self.ins is not None:
            self.backend.swap_blocks(outs=BlockCopies.none(), ins=self.ins)
            self.ins = None
        pending = self.backend.submit(batch)
        self.contained(self.connector.end_step)
        return pending, self.contained(self.connector.poll)

    def contained(self, call, *args):
        try:
            return call(*args)
        except Exception:
            return None

    def copy_blocks(self, *, sources, targets):
        self.call(self.backend.copy_blocks, sources=sources, targets=targets)

    def swap_blocks(self, *, outs, ins):
        if self.connector is not None:
            self.ins, ins = ins, BlockCopies.none()
        self.call(self.backend.swap_blocks, outs=outs, ins=ins)

    def embed(self, token_ids):
        return self.call(self.backend.embed, token_ids)

    def kv_layout(self):
        return self.backend.kv_cache().layout

    def close_connector(self):
        self.call(self.without_connector)

    def without_connector(self):
        connector, self.connector = self.connector, None
        if connector is not None:
            self.contained(connector.close)

    def close(self):
        backend, self.backend = self.backend, None
        if backend is not None:
            self.call(backend.close)
        self.thread.shutdown()


class TestOneThread(ExecutorConformance):
    make = OneThread


class WithoutEmbeddings(OneThread):
    def embed(self, token_ids):
        raise BackendError("OneThread does not embed.")


class TestWithoutEmbeddings(ExecutorConformance):
    make = WithoutEmbeddings


class WithoutSwaps(OneThread):
    swap_blocks = None


class TestWithoutSwaps(ExecutorConformance):
    make = WithoutSwaps


class SwapsNothingBack(OneThread):
    def swap_blocks(self, *, outs, ins):
        super().swap_blocks(outs=outs, ins=attrs.evolve(ins, sources=ins.sources[:0], targets=ins.targets[:0]))


class SwapsBeforeTheConnectorSaves(OneThread):
    def swap_blocks(self, *, outs, ins):
        self.call(self.backend.swap_blocks, outs=outs, ins=ins)


class ForgetsWhetherSwapsFailed(OneThread):
    def swap_blocks(self, *, outs, ins):
        self.thread.submit(self.backend.swap_blocks, outs=outs, ins=ins)


class CountsRanksFromOne(OneThread):
    def start(self, *, make_backend, make_sampler, source):
        return super().start(make_backend=lambda rank: make_backend(rank + 1), make_sampler=make_sampler, source=source)


class SwapsSizes(OneThread):
    def memory(self, *, max_num_batched_tokens, max_num_seqs):
        return MemoryReport(total_bytes=1000, free_bytes=900, activation_bytes=max_num_seqs)


class PreparesLater(OneThread):
    def prepare(self, bucket):
        self.thread.submit(self.backend.prepare, bucket)


class WarmsUpLater(OneThread):
    def warm_up(self, buckets, *, progress=None):
        self.thread.submit(self.backend.warm_up, buckets, progress=progress)
        return WarmUpReport(prepared=tuple(buckets))


class LeavesTheBackendOpen(OneThread):
    def close(self):
        self.thread.shutdown()


class ClosesOnce(OneThread):
    def close(self):
        self.call(self.backend.close)
        self.thread.shutdown()


class EmbedsSorted(OneThread):
    def embed(self, token_ids):
        return super().embed(sorted(token_ids, key=len))


class LosesTableWrites(OneThread):
    def run(self, batch):
        none = np.empty(0, np.int32)
        writes = attrs.evolve(batch.table_writes, rows=none, columns=none, block_ids=none)
        return super().run(attrs.evolve(batch, table_writes=writes))


class LastComeFirstRun(OneThread):
    """Keeps a batch back until the next one, or until somebody waits."""

    def __init__(self):
        super().__init__()
        self.held = []

    def submit(self, batch):
        self.held.append(batch)
        return HeldStep(self, batch)


class HeldStep:
    def __init__(self, executor, batch):
        self.executor, self.batch = executor, batch

    def wait(self):
        while self.executor.held:
            batch = self.executor.held.pop()
            found = Step(self.executor.thread.submit(self.executor.run, batch))
            if batch is self.batch:
                return found.wait()
            found.wait()
        raise StepFailedError("lost")


class CopiesFirst(OneThread):
    """Copies without waiting for what was submitted."""

    def __init__(self):
        super().__init__()
        self.held = []

    def copy_blocks(self, *, sources, targets):
        pass


class RawErrors(OneThread):
    class step(Step):  # noqa: N801 - stands for an attribute
        def wait(self):
            pending, report = self.future.result()
            return attrs.evolve(pending.wait(), connector_reports={} if report is None else {0: report})


class EndsWithTheFirstError(OneThread):
    broken = False

    def run(self, batch):
        if self.broken:
            raise RuntimeError("ended")
        try:
            return super().run(batch)
        except Exception:
            self.broken = True
            raise


class OnlyTheOwnerWaits(OneThread):
    class step(Step):  # noqa: N801 - stands for an attribute
        def __init__(self, future):
            import threading

            super().__init__(future)
            self.owner = threading.get_ident()

        def wait(self):
            import threading

            if threading.get_ident() != self.owner:
                threading.Event().wait(2.0)
            return super().wait()


class WaitsInSubmit(OneThread):
    def submit(self, batch):
        step = super().submit(batch)
        step.future.exception()
        return step


class ReportsBeforeThePasses(OneThread):
    def run(self, batch):
        if self.connector is None:
            return super().run(batch)
        self.contained(self.connector.begin_step, batch.connector_message)
        self.contained(self.connector.end_step)
        report = self.contained(self.connector.poll)
        return self.backend.submit(batch), report


class AlwaysPromisesLayers(OneThread):
    def run(self, batch):
        if self.connector is not None:
            self.contained(self.connector.expect_layers)
        return super().run(batch)


class HearsOneOfTwoRanks(OneThread):
    num_ranks = 2


class NeverRegisters(OneThread):
    def allocate(self, plan):
        self.call(self.backend.allocate, plan)
        self.connector = plan.connector


class TrustsTheConnector(OneThread):
    def contained(self, call, *args):
        return call(*args)


class TellsWorkersTwice(OneThread):
    """Has layouts of ranks, as an executor whose ranks are elsewhere, and tells its worker side of them twice."""

    def kv_layouts(self):
        return [self.kv_layout()]

    def allocate(self, plan):
        super().allocate(plan)
        for _ in range(2):
            plan.connector.on_ranks(self.kv_layouts(), rank=0)


class InventsALayout(OneThread):
    def kv_layout(self):
        return attrs.evolve(super().kv_layout(), block_size=3)


class LeavesTheConnectorOpen(OneThread):
    def close_connector(self):
        pass


class ClosesTheConnectorOnce(OneThread):
    def close_connector(self):
        self.connector.close()
        super().close_connector()


class ForgetsAborted(OneThread):
    """Drops row starts of a row that was given away early."""

    def run(self, batch):
        self.rows = getattr(self, "rows", set())
        starts = tuple(start for start in batch.row_starts if start.row not in self.rows or len(start.token_ids) < 20)
        self.rows |= {start.row for start in batch.row_starts}
        return super().run(attrs.evolve(batch, row_starts=starts))


MUTANTS = {
    CountsRanksFromOne: "test_start_makes_a_backend_of_rank_0_and_loads_the_model_with_its_sampler",
    SwapsSizes: "test_memory_is_the_backends_report",
    PreparesLater: "test_prepare_reaches_the_backend_and_fails_with_it",
    WarmsUpLater: "test_warm_up_reaches_the_backend_and_fails_with_it",
    LeavesTheBackendOpen: "test_close_closes_the_backend_and_may_be_called_twice",
    ClosesOnce: "test_close_closes_the_backend_and_may_be_called_twice",
    EmbedsSorted: "test_embed_returns_the_backends_vectors_in_order",
    LosesTableWrites: "test_tokens_are_those_of_the_backend",
    LastComeFirstRun: "test_batches_run_in_the_order_in_which_they_were_submitted",
    CopiesFirst: "test_blocks_are_copied_in_order_with_batches",
    SwapsNothingBack: "test_blocks_are_swapped_in_order_with_batches",
    ForgetsWhetherSwapsFailed: "test_swap_that_fails_is_told_with_it_or_with_the_next_batch",
    RawErrors: "test_step_that_raises_fails_alone",
    EndsWithTheFirstError: "test_step_that_raises_fails_alone",
    OnlyTheOwnerWaits: "test_any_thread_may_wait",
    WaitsInSubmit: "test_submit_returns_although_the_backend_computes",
    ReportsBeforeThePasses: "test_connectors_calls_frame_the_passes_and_its_report_comes_with_the_tokens",
    HearsOneOfTwoRanks: "test_reports_come_by_rank_from_every_rank_that_there_is",
    NeverRegisters: "test_connectors_calls_frame_the_passes_and_its_report_comes_with_the_tokens",
    SwapsBeforeTheConnectorSaves: "test_blocks_come_in_behind_the_connectors_begin_step",
    AlwaysPromisesLayers: "test_connector_expects_layers_only_where_passes_are_the_first_to_write",
    TrustsTheConnector: "test_a_connector_that_raises_costs_no_token",
    TellsWorkersTwice: "test_worker_sides_in_other_processes_are_told_once_what_each_rank_holds",
    InventsALayout: "test_layout_is_that_of_the_backends_cache",
    LeavesTheConnectorOpen: "test_closed_connector_is_called_no_more_and_steps_go_on",
    ClosesTheConnectorOnce: "test_closed_connector_is_called_no_more_and_steps_go_on",
    ForgetsAborted: "test_texts_of_a_whole_engine_are_right",
}


@pytest.fixture
def _impatient(monkeypatch):
    """A broken executor is not waited for as long as a slow one."""
    monkeypatch.setattr(suite_module, "_WAIT_S", 0.4)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize(("mutant", "test"), MUTANTS.items(), ids=[mutant.__name__ for mutant in MUTANTS])
def test_suite_fails_a_broken_executor(failures_of, mutant, test):
    assert failures_of(ExecutorConformance, mutant, only=test)


def test_suite_passes_the_executor_that_the_mutants_break(failures_of):
    assert failures_of(ExecutorConformance, OneThread) == set()


def test_fake_executor_has_the_same_order_of_swaps_and_connector():
    class Suite(ExecutorConformance):
        make = FakeExecutor

    Suite().test_blocks_come_in_behind_the_connectors_begin_step()
    Suite().test_connector_expects_layers_only_where_passes_are_the_first_to_write()
    Suite().test_blocks_are_swapped_in_order_with_batches()


def test_every_test_of_the_suite_is_needed_by_a_mutant():
    assert set(MUTANTS.values()) == {name for name in dir(ExecutorConformance) if name.startswith("test_")}


def test_suite_without_make_says_what_to_do():
    with pytest.raises(NotImplementedError, match="make = YourExecutor"):
        ExecutorConformance().make()
