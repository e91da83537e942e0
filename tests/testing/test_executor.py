"""The executor suite passes a small correct executor and fails every broken one, each for the right reason."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import attrs
import numpy as np

from support.mutants import broken, proofs
from trencadis.errors import BackendError, StepFailedError
from trencadis.interfaces import BlockCopies, Executor
from trencadis.records import MemoryReport, WarmUpReport
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


class WarmsUpLater(OneThread):
    def warm_up(self, buckets, *, progress=None):
        self.thread.submit(self.backend.warm_up, buckets, progress=progress)
        return WarmUpReport(prepared=tuple(buckets))


class ClosesOnce(OneThread):
    def close(self):
        self.call(self.backend.close)
        self.thread.shutdown()


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


class TellsWorkersTwice(OneThread):
    """Has layouts of ranks, as an executor whose ranks are elsewhere, and tells its worker side of them twice."""

    def kv_layouts(self):
        return [self.kv_layout()]

    def allocate(self, plan):
        super().allocate(plan)
        for _ in range(2):
            plan.connector.on_ranks(self.kv_layouts(), rank=0)


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
    "test_start_makes_a_backend_of_rank_0_and_loads_the_model_with_its_sampler": [
        broken(
            "CountsRanksFromOne",
            OneThread,
            start=lambda self, *, make_backend, make_sampler, source: OneThread.start(
                self, make_backend=lambda rank: make_backend(rank + 1), make_sampler=make_sampler, source=source
            ),
        )
    ],
    "test_memory_is_the_backends_report": [
        broken(
            "SwapsSizes",
            OneThread,
            memory=lambda self, *, max_num_batched_tokens, max_num_seqs: MemoryReport(
                total_bytes=1000, free_bytes=900, activation_bytes=max_num_seqs
            ),
        )
    ],
    "test_prepare_reaches_the_backend_and_fails_with_it": [
        broken(
            "PreparesLater", OneThread, prepare=lambda self, bucket: self.thread.submit(self.backend.prepare, bucket)
        )
    ],
    "test_warm_up_reaches_the_backend_and_fails_with_it": [WarmsUpLater],
    "test_close_closes_the_backend_and_may_be_called_twice": [
        broken("LeavesTheBackendOpen", OneThread, close=lambda self: self.thread.shutdown()),
        ClosesOnce,
    ],
    "test_embed_returns_the_backends_vectors_in_order": [
        broken(
            "EmbedsSorted", OneThread, embed=lambda self, token_ids: OneThread.embed(self, sorted(token_ids, key=len))
        )
    ],
    "test_tokens_are_those_of_the_backend": [LosesTableWrites],
    "test_batches_run_in_the_order_in_which_they_were_submitted": [LastComeFirstRun],
    "test_blocks_are_copied_in_order_with_batches": [CopiesFirst],
    "test_blocks_are_swapped_in_order_with_batches": [
        broken(
            "SwapsNothingBack",
            OneThread,
            swap_blocks=lambda self, *, outs, ins: OneThread.swap_blocks(
                self, outs=outs, ins=attrs.evolve(ins, sources=ins.sources[:0], targets=ins.targets[:0])
            ),
        )
    ],
    "test_swap_that_fails_is_told_with_it_or_with_the_next_batch": [
        broken(
            "ForgetsWhetherSwapsFailed",
            OneThread,
            swap_blocks=lambda self, *, outs, ins: self.thread.submit(self.backend.swap_blocks, outs=outs, ins=ins),
        )
    ],
    "test_step_that_raises_fails_alone": [RawErrors, EndsWithTheFirstError],
    "test_any_thread_may_wait": [OnlyTheOwnerWaits],
    "test_submit_returns_although_the_backend_computes": [WaitsInSubmit],
    "test_connectors_calls_frame_the_passes_and_its_report_comes_with_the_tokens": [ReportsBeforeThePasses],
    "test_reports_come_by_rank_from_every_rank_that_there_is": [broken("HearsOneOfTwoRanks", OneThread, num_ranks=2)],
    "test_blocks_come_in_behind_the_connectors_begin_step": [
        broken(
            "SwapsBeforeTheConnectorSaves",
            OneThread,
            swap_blocks=lambda self, *, outs, ins: self.call(self.backend.swap_blocks, outs=outs, ins=ins),
        )
    ],
    "test_connector_expects_layers_only_where_passes_are_the_first_to_write": [AlwaysPromisesLayers],
    "test_a_connector_that_raises_costs_no_token": [
        broken("TrustsTheConnector", OneThread, contained=lambda self, call, *args: call(*args))
    ],
    "test_worker_sides_in_other_processes_are_told_once_what_each_rank_holds": [TellsWorkersTwice],
    "test_layout_is_that_of_the_backends_cache": [
        broken(
            "InventsALayout", OneThread, kv_layout=lambda self: attrs.evolve(OneThread.kv_layout(self), block_size=3)
        )
    ],
    "test_closed_connector_is_called_no_more_and_steps_go_on": [
        broken("LeavesTheConnectorOpen", OneThread, close_connector=lambda self: None),
        ClosesTheConnectorOnce,
    ],
    "test_texts_of_a_whole_engine_are_right": [ForgetsAborted],
}

test_suite_fails_what_is_broken, test_every_law_has_a_mutant = proofs(
    ExecutorConformance, MUTANTS, patches={"trencadis_testing.executor._WAIT_S": 0.4}
)


def test_fake_executor_has_the_same_order_of_swaps_and_connector():
    class Suite(ExecutorConformance):
        make = FakeExecutor

    Suite().test_blocks_come_in_behind_the_connectors_begin_step()
    Suite().test_connector_expects_layers_only_where_passes_are_the_first_to_write()
    Suite().test_blocks_are_swapped_in_order_with_batches()
