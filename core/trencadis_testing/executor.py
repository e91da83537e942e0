"""Conformance suite of the noun ``executor``."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import BackendError, StepFailedError
from trencadis.interfaces import (
    BlockCopies,
    Executor,
    PendingStep,
    SupportsEmbedding,
    SupportsRemoteKVConnector,
    SupportsSwapping,
)
from trencadis.records import Bucket, ConnectorReport, ModelSource, Phase, StepOutput
from trencadis_testing.driver import BackendDriver, Work
from trencadis_testing.engines import make_engine
from trencadis_testing.executor_fakes import (
    CLOSED,
    POISON,
    BlockedBackends,
    ExpectingWorker,
    FramingWorker,
    Gate,
    JoiningWorker,
    RaisingWorker,
    make_backend,
    make_sampler,
    no_tokens,
    one_token,
    plan_of,
)
from trencadis_testing.fakes import FakeBackend, fake_text
from trencadis_testing.optional_calls import FullExecutor, full_executor
from trencadis_testing.workloads import arrivals, serve, wrong_texts

__all__ = ["ExecutorConformance"]

_SOURCE = ModelSource(path="model/of/the/suite")
_WAIT_S = 20.0


class ExecutorConformance:
    """What every executor must do; inherit from it, and set ``make``.

    The backends are fakes whose behaviour shows in what an executor returns, so that ranks in other processes pass too: the
    makers handed over can be pickled. Example::

        class TestThreaded(ExecutorConformance):
            make = Threaded

    Attributes:
        returns_at_once: ``submit`` returns although the backend's own has not; set it to False for an executor that calls
            the backend where it is called itself, which suits devices that do not block.
    """

    returns_at_once: bool = True

    def make(self) -> Executor:
        """Return a new executor, not started."""
        raise NotImplementedError(f"{type(self).__name__} needs make = YourExecutor, or a method make(self)")

    # ------------------------------------------------------------------------------------------------ life

    def test_start_makes_a_backend_of_rank_0_and_loads_the_model_with_its_sampler(self) -> None:
        """The facts are those of the backend, which saw the source and the sampler of its own rank."""
        with _Running(self.make()) as executor:
            facts = executor.start(make_backend=make_backend, make_sampler=make_sampler, source=_SOURCE)
            assert facts.architecture == "model/of/the/suite, rank 0, sampler 0"
            assert executor.capabilities.default_block_size == 4

    def test_memory_is_the_backends_report(self) -> None:
        """The engine sizes its cache with it."""
        with _Running(self.make(), starts=True) as executor:
            report = executor.memory(max_num_batched_tokens=30, max_num_seqs=3)
            assert (report.total_bytes, report.free_bytes, report.activation_bytes) == (1000, 900, 33)

    def test_prepare_reaches_the_backend_and_fails_with_it(self) -> None:
        """It returns when the bucket is prepared, so what goes wrong is known then."""
        with _Running(self.make(), starts=True, allocates=True) as executor:
            executor.prepare(Bucket(1, 8, 0))
            told = _error_of(lambda: executor.prepare(Bucket(POISON, 1, 1, Phase.DECODE)), BackendError)
            assert "bucket" in told, "prepare() returned although the backend refused the bucket"

    def test_warm_up_reaches_the_backend_and_fails_with_it(self) -> None:
        """The report is the backend's, and says what is prepared when it returns."""
        with _Running(self.make(), starts=True, allocates=True) as executor:
            buckets = (Bucket(1, 8, 0), Bucket(2, 1, 4, Phase.DECODE))
            seen: list[tuple[int, int]] = []
            report = executor.warm_up(buckets, progress=lambda done, total: seen.append((done, total)))
            assert set(report.prepared) == set(buckets)
            assert seen == [(1, 2), (2, 2)]
            told = _error_of(lambda: executor.warm_up((Bucket(POISON, 1, 1, Phase.DECODE),)), BackendError)
            assert "bucket" in told, "warm_up() returned although the backend refused the bucket"

    def test_close_closes_the_backend_and_may_be_called_twice(self) -> None:
        """Also before anything was started: an engine that fails to start closes what it has."""
        unused = self.make()
        unused.close()
        unused.close()
        with tempfile.TemporaryDirectory() as folder:
            mark = Path(folder) / CLOSED
            executor = self.make()
            source = ModelSource(path=str(mark))
            executor.start(make_backend=make_backend, make_sampler=make_sampler, source=source)
            executor.allocate(plan_of())
            executor.close()
            executor.close()
            assert mark.read_text() == "closed\n" * executor.num_ranks, "not every backend was closed once"

    def test_embed_returns_the_backends_vectors_in_order(self) -> None:
        """Or says that this executor does not embed."""
        texts = [np.array(tokens, np.int32) for tokens in ([1, 2, 3], [5], [7, 7])]
        with _Running(self.make(), starts=True) as executor:
            if not isinstance(executor, SupportsEmbedding):
                return
            try:
                vectors = executor.embed(texts)
            except BackendError as error:
                assert "does not embed" in str(error)  # noqa: PT017 - embedding is optional
                return
            assert vectors.tolist() == [[3.0, 6.0], [1.0, 5.0], [2.0, 14.0]]

    # ----------------------------------------------------------------------------------------------- steps

    def test_tokens_are_those_of_the_backend(self) -> None:
        """One step after the other, several sequences, prompts in chunks."""
        prompts = {0: [1, 2, 3], 2: list(range(20, 40))}
        with _Running(self.make(), starts=True, allocates=True) as executor:
            found = _driver(executor).generate(prompts, 6, chunk=7)
        assert found == {row: fake_text(prompt, 6, eos=-1) for row, prompt in prompts.items()}

    def test_batches_run_in_the_order_in_which_they_were_submitted(self) -> None:
        """Several steps are submitted before any is waited for; each needs the tokens of the one before."""
        with _Running(self.make(), starts=True, allocates=True) as executor:
            driver = _driver(executor)
            driver.start(0, [5, 6, 7])
            for _ in range(4):
                driver.submit([Work(0)])
            for _ in range(4):
                driver.wait()
            assert driver.output(0) == fake_text([5, 6, 7], 4, eos=-1)

    def test_blocks_are_copied_in_order_with_batches(self) -> None:
        """After every batch submitted so far, and before any later one."""
        with _Running(self.make(), starts=True, allocates=True) as executor:
            driver = _driver(executor)
            driver.start(0, [5, 6, 7, 8, 9])
            driver.step([Work(0)])
            driver.submit([Work(0)])
            driver.move(0)
            driver.submit([Work(0)])
            driver.wait()
            driver.wait()
            assert driver.output(0) == fake_text([5, 6, 7, 8, 9], 3, eos=-1)

    def test_blocks_are_swapped_in_order_with_batches(self) -> None:
        """To host memory after every batch submitted so far, and back before any later one; or the executor does not swap."""
        with _Running(self.make(), starts=True, allocates=True) as executor:
            if _refuses_to_swap(executor):
                return
            driver = _driver(executor)
            driver.start(0, [5, 6, 7, 8, 9])
            driver.step([Work(0)])
            driver.submit([Work(0)])
            driver.swap_out(0)
            driver.start(1, [3, 2, 1])
            driver.submit([Work(1)])
            driver.swap_in(0)
            driver.submit([Work(0), Work(1)])
            for _ in range(3):
                driver.wait()
            assert driver.output(0) == fake_text([5, 6, 7, 8, 9], 3, eos=-1)
            assert driver.output(1) == fake_text([3, 2, 1], 2, eos=-1)

    def test_swap_that_fails_is_told_with_it_or_with_the_next_batch(self) -> None:
        """Never later and never not at all: the engine recomputes whose blocks it was."""
        with _Running(self.make(), starts=True, allocates=True) as executor:
            if _refuses_to_swap(executor):
                return
            outs = BlockCopies(sources=np.zeros(1, np.int32), targets=np.array([POISON], np.int32))

            def swap_and_run() -> None:
                executor.swap_blocks(outs=outs, ins=BlockCopies.none())
                executor.submit(one_token(1)).wait()

            told = _error_of(swap_and_run, BackendError)
            assert "poison" in told, "neither swap_blocks() nor wait() of the next batch raised"
            assert executor.submit(one_token(1)).wait().num_emitted.tolist() == [0]

    @pytest.mark.parametrize("poison", [POISON, POISON + 1])
    def test_step_that_raises_fails_alone(self, poison: int) -> None:
        """In ``submit`` or in ``wait`` of the backend: it comes as a StepFailedError from ``wait``, and later batches run."""
        with _Running(self.make(), starts=True, allocates=True) as executor:
            bad, good = executor.submit(one_token(poison)), executor.submit(one_token(1))
            for _ in range(2):
                told = _error_of(bad.wait, StepFailedError)
                assert "poison" in told, "wait() did not raise what the step raised"
            assert good.wait().num_emitted.tolist() == [0]

    def test_any_thread_may_wait(self) -> None:
        """The engine's own thread plans; who waits is its affair."""
        with _Running(self.make(), starts=True, allocates=True) as executor:
            pending, outputs = executor.submit(one_token(1)), list[StepOutput]()

            def wait() -> None:
                with contextlib.suppress(Exception):
                    outputs.append(pending.wait())

            thread = threading.Thread(target=wait, daemon=True)
            thread.start()
            thread.join(_WAIT_S)
            assert [output.num_padded_tokens for output in outputs] == [1], "wait() did not return in another thread"

    def test_submit_returns_although_the_backend_computes(self) -> None:
        """A step that is planned while another one runs is what makes an engine fast."""
        if not self.returns_at_once:
            pytest.skip("this executor calls the backend in the caller's thread")
        with tempfile.TemporaryDirectory() as folder:
            gate = Gate(Path(folder))
            executor = self.make()
            executor.start(make_backend=BlockedBackends(gate), make_sampler=make_sampler, source=_SOURCE)
            executor.allocate(plan_of())
            pending: list[PendingStep] = []
            thread = threading.Thread(target=lambda: pending.append(executor.submit(one_token(1))), daemon=True)
            thread.start()
            thread.join(_WAIT_S / 4)
            returned = not thread.is_alive()
            gate.open()
            thread.join(_WAIT_S)
            assert returned, "submit() waited for the backend"
            pending[0].wait()
            executor.close()
            gate.close()

    # ------------------------------------------------------------------------------------------- connector

    def test_connectors_calls_frame_the_passes_and_its_report_comes_with_the_tokens(self) -> None:
        """Register after allocation; for each batch begin_step, the passes, end_step, poll."""
        with _Running(self.make(), starts=True) as executor:
            executor.allocate(plan_of(FramingWorker()))
            for token, before in ((41, -1), (42, 41)):
                report = _report(executor.submit(one_token(token, message=b"x" * token)))
                expected = (token, before, token)
                assert report is not None, "the output carries no report"
                assert report.loaded == expected, f"the worker side saw {report.loaded}, not {expected}"

    def test_reports_come_by_rank_from_every_rank_that_there_is(self) -> None:
        """A transfer is over when each of 0 .. num_ranks - 1 has said so: one that is never heard of keeps every load waiting."""
        with _Running(self.make(), starts=True) as executor:
            executor.allocate(plan_of(FramingWorker()))
            reports = executor.submit(one_token(41)).wait().connector_reports
            assert sorted(reports) == list(range(executor.num_ranks)), (
                f"{executor.num_ranks} ranks, reports of {sorted(reports)}"
            )

    def test_blocks_come_in_behind_the_connectors_begin_step(self) -> None:
        """It may still save what was in them; and it finds what goes out gone out, for it may load into their blocks."""
        with _Running(self.make(), starts=True) as executor:
            executor.allocate(plan_of(FramingWorker()))
            if _refuses_to_swap(executor):
                return
            block = BlockCopies(sources=np.zeros(1, np.int32), targets=np.zeros(1, np.int32))
            executor.submit(one_token(41)).wait()
            executor.swap_blocks(outs=block, ins=BlockCopies.none())
            executor.submit(one_token(42)).wait()
            executor.swap_blocks(outs=BlockCopies.none(), ins=block)
            report = _report(executor.submit(no_tokens()))
            assert report is not None
            assert report.loaded == (0, 42, 41), (
                f"the worker side saw {report.loaded[1:]}: 42 came first, 41 back from the host"
            )

    def test_connector_expects_layers_only_where_passes_are_the_first_to_write(self) -> None:
        """Blocks that come in, and a step without passes, touch blocks or do not, layers or no layers: all is copied out before."""
        with _Running(self.make(), starts=True) as executor:
            executor.allocate(plan_of(ExpectingWorker()))
            report = _report(executor.submit(no_tokens()))
            assert report is not None
            assert report.loaded == (0,), "told of a step without passes"
            executor.submit(one_token(41)).wait()
            if _refuses_to_swap(executor):
                return
            block = BlockCopies(sources=np.zeros(1, np.int32), targets=np.zeros(1, np.int32))
            executor.swap_blocks(outs=block, ins=BlockCopies.none())
            executor.submit(one_token(42)).wait()
            executor.swap_blocks(outs=BlockCopies.none(), ins=block)
            report = _report(executor.submit(one_token(43)))
            assert report is not None
            assert report.loaded == (0,), "told of a step before whose passes blocks come in"

    def test_a_connector_that_raises_costs_no_token(self) -> None:
        """The engine gives its loads up after a time; the step goes on."""
        with _Running(self.make(), starts=True) as executor:
            executor.allocate(plan_of(RaisingWorker()))
            driver = _driver(executor)
            assert driver.generate({0: [5, 6, 7]}, 3)[0] == fake_text([5, 6, 7], 3, eos=-1)

    def test_layout_is_that_of_the_backends_cache(self) -> None:
        """The connector's scheduler side, which sees no backend, is told what blocks are made of."""
        with _Running(self.make(), starts=True) as executor:
            executor.allocate(plan_of(FramingWorker()))
            backend = FakeBackend()
            backend.allocate(plan_of())
            assert executor.kv_layout() == backend.kv_cache().layout

    def test_worker_sides_in_other_processes_are_told_once_what_each_rank_holds(self) -> None:
        """Messages of worker sides in other processes arrive with their rank; a worker side in the engine's process gets no such call."""
        with _Running(self.make(), starts=True) as executor:
            executor.allocate(plan_of(JoiningWorker()))
            reports = executor.submit(one_token(41)).wait().connector_reports
            if not isinstance(executor, SupportsRemoteKVConnector):
                assert all(not report.loaded for report in reports.values()), "told of ranks, and has no kv_layouts()"
                return
            layouts = executor.kv_layouts()
            names = tuple(layout.numerics.encode() for layout in layouts)
            assert len(layouts) == executor.num_ranks
            for rank, report in reports.items():
                assert report.loaded == (rank, len(layouts)), f"rank {rank} was told {report.loaded}"
                assert report.messages == names, "messages of a worker side do not come with its report"

    def test_closed_connector_is_called_no_more_and_steps_go_on(self) -> None:
        """It is closed after the batches submitted before; from then on no transfer touches a block."""
        with _Running(self.make(), starts=True) as executor:
            executor.allocate(plan_of(FramingWorker()))
            before = executor.submit(one_token(41))
            executor.close_connector()
            executor.close_connector()
            report = _report(before)
            assert report is not None, "a batch that was submitted before went without the connector"
            assert report.loaded == (0, -1, 41)
            report = _report(executor.submit(one_token(42)))
            assert report is None or not report.loaded, f"the worker side saw {report.loaded} after it was closed"

    # ---------------------------------------------------------------------------------------- whole engine

    def test_texts_of_a_whole_engine_are_right(self) -> None:
        """With aborts, preemptions and two steps in flight; every block comes back."""
        todo, clock = arrivals(6), SimulatedClock()
        engine = make_engine(
            executor=self.make(),
            backend=FakeBackend(max_model_len=120),
            clock=clock,
            num_blocks=30,
            max_num_seqs=4,
            max_num_batched_tokens=24,
        )
        served = serve(engine, clock, todo, abort_every=7)
        engine.close()
        assert wrong_texts(served, todo) == []


class _Running:
    """An executor that is closed at the end."""

    def __init__(self, executor: Executor, *, starts: bool = False, allocates: bool = False) -> None:
        self._executor = executor
        if starts:
            executor.start(make_backend=make_backend, make_sampler=make_sampler, source=_SOURCE)
        if allocates:
            executor.allocate(plan_of())

    def __enter__(self) -> FullExecutor:
        return full_executor(self._executor)

    def __exit__(self, *_: object) -> None:
        self._executor.close()


def _report(step: PendingStep) -> ConnectorReport | None:
    """Return what the KV connector of rank 0 says in a step's output; None if it says nothing."""
    return step.wait().connector_reports.get(0)


def _error_of(call: Callable[[], object], kind: type[Exception]) -> str:
    """Return the message of what a call raises; empty if it returns."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def _refuses_to_swap(executor: Executor) -> bool:
    """Whether the executor lacks the call, or says that its backend does not swap blocks."""
    if not isinstance(executor, SupportsSwapping):
        return True
    nothing = BlockCopies.none()
    return "does not swap" in _error_of(lambda: executor.swap_blocks(outs=nothing, ins=nothing), BackendError)


def _driver(executor: Executor) -> BackendDriver:
    backend: Any = executor  # it has the methods of a backend that the driver calls
    return BackendDriver(backend, plan_of(), seed=3)
