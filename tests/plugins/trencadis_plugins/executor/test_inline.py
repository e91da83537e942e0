from __future__ import annotations

import logging
import threading

import numpy as np
import pytest

from trencadis.errors import BackendError, ModelLoadError, StepFailedError
from trencadis.interfaces import AllocationPlan, BlockCopies, KVWorkerSide
from trencadis.records import Batch, Bucket, ConnectorReport, ModelSource, StepOutput, TableWrites
from trencadis_plugins.executor.inline import InlineExecutor
from trencadis_testing.driver import BackendDriver
from trencadis_testing.executor_fakes import ExpectingWorker, no_tokens, one_token, plan_of
from trencadis_testing.fakes import FakeBackend, fake_embedding, fake_text

SOURCE = ModelSource(path="fake")
NONE = np.empty(0, np.int32)


def plan(connector=None):
    return AllocationPlan(
        num_blocks=16,
        block_size=4,
        num_rows=4,
        max_model_len=40,
        max_num_batched_tokens=32,
        connector=connector,
    )


def batch(step=0, message=b""):
    writes = TableWrites(rows=NONE, columns=NONE, block_ids=NONE)
    return Batch(step=step, num_sequences=0, row_starts=(), table_writes=writes, passes=(), connector_message=message)


class Recorder(FakeBackend):
    """Notes each call with its thread; a step may wait for a gate, or raise."""

    def __init__(self):
        super().__init__()
        self.calls, self.threads = [], set()
        self.gate = threading.Event()
        self.gate.set()
        self.errors = {}

    def note(self, name):
        self.calls.append(name)
        self.threads.add(threading.current_thread().name)

    def load(self, source, *, sampler):
        self.note("load")
        self.sampler = sampler
        return super().load(source, sampler=sampler)

    def memory(self, **sizes):
        self.note("memory")
        return super().memory(**sizes)

    def allocate(self, plan):
        self.note("allocate")
        super().allocate(plan)

    def prepare(self, bucket):
        self.note("prepare")

    def submit(self, batch):
        self.gate.wait(60)
        self.note(f"submit {batch.step}")
        if batch.step in self.errors:
            raise self.errors[batch.step]
        return super().submit(batch)

    def copy_blocks(self, **arrays):
        self.note("copy_blocks")
        super().copy_blocks(**arrays)

    def embed(self, token_ids):
        self.note("embed")
        return super().embed(token_ids)

    def close(self):
        self.note("close")


class Worker(KVWorkerSide):
    def __init__(self, calls, raises=()):
        self.calls, self.raises = calls, raises

    def note(self, name):
        self.calls.append(name)
        if name in self.raises:
            raise OSError(name)

    def register(self, kv_cache):
        self.cache = kv_cache

    def begin_step(self, message):
        self.message = message
        self.note("begin_step")

    def end_step(self):
        self.note("end_step")

    def poll(self):
        self.note("poll")
        return ConnectorReport(loaded=(7,))

    def close(self):
        self.note("connector close")


@pytest.fixture
def started():
    backend, executor = Recorder(), InlineExecutor()
    facts = executor.start(
        make_backend=lambda rank: backend, make_sampler=lambda rank: f"sampler {rank}", source=SOURCE
    )
    assert facts.architecture == "Fake"
    yield executor, backend
    backend.gate.set()
    executor.close()


def test_every_call_of_the_backend_comes_from_one_thread(started):
    executor, backend = started
    executor.memory(max_num_batched_tokens=8, max_num_seqs=1)
    executor.allocate(plan())
    executor.prepare(Bucket(1, 1, 1))
    executor.submit(batch()).wait()
    executor.copy_blocks(sources=NONE, targets=NONE)
    executor.embed([np.array([1], np.int32)])
    executor.close()
    assert backend.calls == ["load", "memory", "allocate", "prepare", "submit 0", "copy_blocks", "embed", "close"]
    assert len(backend.threads) == 1
    assert threading.current_thread().name not in backend.threads
    assert backend.sampler == "sampler 0"


def test_submit_returns_before_the_batch_runs_and_batches_keep_their_order(started):
    executor, backend = started
    executor.allocate(plan())
    backend.gate.clear()
    pending = [executor.submit(batch(step)) for step in range(3)]
    assert backend.calls == ["load", "allocate"]
    backend.gate.set()
    assert all(isinstance(one.wait(), StepOutput) for one in reversed(pending))
    assert backend.calls[2:] == ["submit 0", "submit 1", "submit 2"]


def test_buckets_that_were_put_off_are_prepared_behind_the_batches_submitted_before(started):
    executor, backend = started
    executor.allocate(plan())
    left = [Bucket(1, 1, size) for size in (1, 2, 3)]

    def warm_up_rest(*, is_idle):
        backend.note(f"rest {is_idle}")
        return (left.pop(),) if left else ()

    backend.warm_up_rest = warm_up_rest
    backend.gate.clear()
    pending = executor.submit(batch())
    assert executor.warm_up_rest(is_idle=False) == ()  # nothing waits for a step that runs
    assert executor.warm_up_rest(is_idle=False) == ()
    backend.gate.set()
    pending.wait()
    assert executor.warm_up_rest(is_idle=True) == (Bucket(1, 1, 3),)
    assert executor.warm_up_rest(is_idle=True) == (Bucket(1, 1, 2),)
    assert backend.calls[2:] == ["submit 0", "rest False", "rest True"]
    assert len(backend.threads) == 1


def test_preparing_that_raises_is_told_once(started):
    executor, backend = started
    executor.allocate(plan())
    backend.warm_up_rest = lambda *, is_idle: 1 / 0
    assert executor.warm_up_rest(is_idle=False) == ()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            executor.warm_up_rest(is_idle=True)


def test_texts_are_embedded_behind_the_batches_submitted_before(started):
    executor, backend = started
    executor.allocate(plan())
    pending = executor.submit(batch())
    texts = [np.array(tokens, np.int32) for tokens in ([5, 6, 7], [8])]
    vectors = executor.embed(texts)
    assert backend.calls == ["load", "allocate", "submit 0", "embed"]
    np.testing.assert_allclose(vectors, [fake_embedding([5, 6, 7]), fake_embedding([8])], rtol=1e-6)
    pending.wait()


def test_texts_that_cannot_be_embedded_raise_and_later_batches_run(started):
    executor, backend = started
    executor.allocate(plan())
    backend._embedding_size = 0
    with pytest.raises(BackendError, match="Recorder does not embed"):
        executor.embed([np.array([1], np.int32)])
    executor.submit(batch()).wait()
    executor.close()
    with pytest.raises(BackendError, match="closed"):
        executor.embed([np.array([1], np.int32)])


def test_step_that_raises_fails_alone_and_names_backend_and_cause(started):
    executor, backend = started
    executor.allocate(plan())
    backend.errors = {1: ValueError("bad shape"), 2: StepFailedError("row 3: lost")}
    pending = [executor.submit(batch(step)) for step in range(4)]
    with pytest.raises(StepFailedError, match="Recorder: ValueError: bad shape") as caught:
        pending[1].wait()
    assert caught.value.__cause__ is backend.errors[1]
    with pytest.raises(StepFailedError, match=r"^row 3: lost$"):
        pending[2].wait()
    pending[0].wait()
    pending[3].wait()


def test_error_of_a_running_step_is_named_too(started):
    executor, backend = started
    backend._fails = None
    executor.allocate(plan())

    class Broken:
        def wait(self):
            raise RuntimeError("device lost")

    backend.submit = lambda batch: Broken()
    with pytest.raises(StepFailedError, match="RuntimeError: device lost"):
        executor.submit(batch()).wait()


def test_connector_frames_each_step_and_its_report_travels_with_the_output(started):
    executor, backend = started
    worker = Worker(backend.calls)
    executor.allocate(plan(worker))
    assert worker.cache is backend.kv_cache() or len(worker.cache) == 3
    output = executor.submit(batch(message=b"load 7")).wait()
    assert backend.calls[2:] == ["begin_step", "submit 0", "end_step", "poll"]
    assert worker.message == b"load 7"
    assert output.connector_reports == {0: ConnectorReport(loaded=(7,))}
    executor.close()
    assert backend.calls[-2:] == ["connector close", "close"]


@pytest.mark.parametrize(
    ("layerwise_kv", "has_passes", "comes_in", "expected"),
    [(True, True, False, 1), (False, True, False, 0), (True, False, False, 0), (True, True, True, 0)],
    ids=["told", "backend cannot", "no passes", "blocks come in"],
)
def test_connector_is_told_of_layers_that_it_can_wait_for(layerwise_kv, has_passes, comes_in, expected):
    worker, executor = ExpectingWorker(), InlineExecutor()
    executor.start(
        make_backend=lambda rank: FakeBackend(layerwise_kv=layerwise_kv, eos=-1),
        make_sampler=lambda rank: None,
        source=SOURCE,
    )
    executor.allocate(plan_of(worker))
    if comes_in:
        block = BlockCopies(sources=np.zeros(1, np.int32), targets=np.zeros(1, np.int32))
        executor.swap_blocks(outs=BlockCopies.none(), ins=block)
    output = executor.submit(one_token(41) if has_passes else no_tokens()).wait()
    assert output.connector_reports[0].loaded == (expected,)
    executor.close()


def test_connector_ends_a_step_that_raises(started):
    executor, backend = started
    executor.allocate(plan(Worker(backend.calls)))
    backend.errors = {0: ValueError("bad")}
    with pytest.raises(StepFailedError):
        executor.submit(batch()).wait()
    assert backend.calls[-1] == "end_step"


@pytest.mark.parametrize("call", ["begin_step", "end_step", "poll", "connector close"])
def test_connector_that_raises_costs_a_warning_and_no_step(started, call, caplog):
    executor, backend = started
    executor.allocate(plan(Worker(backend.calls, raises=(call,))))
    caplog.set_level(logging.WARNING, logger="trencadis.executor")
    output = executor.submit(batch()).wait()
    assert (not output.connector_reports) == (call == "poll")
    executor.close()
    assert backend.calls[-1] == "close"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_layout_is_asked_for_on_the_backends_thread(started):
    executor, backend = started
    executor.allocate(plan())
    asked = []
    cache = backend.kv_cache
    backend.kv_cache = lambda: asked.append(threading.current_thread().name) or cache()
    assert executor.kv_layout() == cache().layout
    assert asked[0] in backend.threads


def test_backend_without_a_pool_is_refused_with_the_remedy(started):
    executor, backend = started

    def refuse():
        raise BackendError("no cache to show")

    backend.kv_cache = refuse
    with pytest.raises(BackendError, match="no cache to show"):
        executor.allocate(plan(Worker(backend.calls)))


def test_connector_is_closed_behind_what_was_submitted_and_asked_no_more(started):
    executor, backend = started
    executor.allocate(plan(Worker(backend.calls)))
    backend.gate.clear()
    step = executor.submit(batch())
    threading.Timer(0.05, backend.gate.set).start()
    executor.close_connector()
    assert backend.calls[2:] == ["begin_step", "submit 0", "end_step", "poll", "connector close"]
    assert step.wait().connector_reports == {0: ConnectorReport(loaded=(7,))}
    assert executor.submit(batch(1)).wait().connector_reports == {}
    executor.close_connector()
    executor.close()
    assert backend.calls.count("connector close") == 1


def test_connector_whose_close_raises_is_gone_all_the_same(started, caplog):
    executor, backend = started
    executor.allocate(plan(Worker(backend.calls, raises=("connector close",))))
    executor.close_connector()
    assert "worker side raised" in caplog.text
    assert executor.submit(batch()).wait().connector_reports == {}


def test_without_a_connector_there_is_no_report(started):
    executor, _ = started
    executor.allocate(plan())
    assert executor.submit(batch()).wait().connector_reports == {}


def test_report_of_a_step_that_fails_after_it_was_submitted_goes_with_the_next(started, monkeypatch):
    """As an error that a device tells only when its results are read; the worker side reports everything once."""
    executor, backend = started
    executor.allocate(plan(Worker(backend.calls)))

    class Failed:
        def wait(self):
            raise RuntimeError("a hiccup of the device")

    submit = backend.submit
    monkeypatch.setattr(backend, "submit", lambda one: Failed() if one.step < 2 else submit(one))
    steps = [executor.submit(batch(number)) for number in range(4)]
    for step in steps[:2]:
        with pytest.raises(StepFailedError, match="a hiccup"):
            step.wait()
    assert [step.wait().connector_reports[0].loaded for step in steps[2:]] == [(7, 7, 7), (7,)]


def test_text_is_that_of_the_backend(started):
    executor, _ = started
    executor.allocate(plan())
    prompts = {0: [5, 6, 7], 2: [9] * 11}
    found = BackendDriver(executor, plan()).generate(prompts, 6, chunk=4)
    assert found == {row: fake_text(tokens, 6, eos=-1) for row, tokens in prompts.items()}


def test_load_error_reaches_the_caller_unchanged():
    def broken(rank):
        raise ModelLoadError("no config.json")

    executor = InlineExecutor()
    with pytest.raises(ModelLoadError, match=r"^no config\.json$"):
        executor.start(make_backend=broken, make_sampler=lambda rank: None, source=SOURCE)
    executor.close()


def test_closing_twice_closes_once_and_nothing_runs_afterwards(started):
    executor, backend = started
    executor.close()
    executor.close()
    assert backend.calls == ["load", "close"]
    with pytest.raises(BackendError, match="closed"):
        executor.submit(batch())
    with pytest.raises(BackendError, match="closed"):
        executor.start(make_backend=lambda rank: backend, make_sampler=lambda rank: None, source=SOURCE)


def test_executor_that_was_not_started_says_so():
    executor = InlineExecutor()
    with pytest.raises(BackendError, match="not started"):
        _ = executor.capabilities
    executor.close()


def test_a_start_that_was_interrupted_is_not_waited_for_and_closes_what_it_loaded(monkeypatch):
    executor, backend = InlineExecutor(), FakeBackend()
    may_load, loads, closed = threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(backend, "close", closed.set)

    def make_backend(rank):
        loads.set()
        may_load.wait()
        return backend

    def interrupted(future, timeout=None):
        loads.wait()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("concurrent.futures.Future.result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            executor.start(make_backend=make_backend, make_sampler=lambda rank: one_token, source=ModelSource(path="x"))
    executor.close()
    assert not closed.is_set()
    may_load.set()
    assert closed.wait(60)
