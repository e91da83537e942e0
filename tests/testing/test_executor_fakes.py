from __future__ import annotations

import pickle
import threading

import pytest

from trencadis.errors import BackendError
from trencadis.records import Bucket, ModelSource
from trencadis_testing.executor_fakes import (
    CLOSED,
    POISON,
    BlockedBackends,
    ExpectingWorker,
    FramingWorker,
    Gate,
    QuietWorker,
    RaisingWorker,
    make_backend,
    make_sampler,
    one_token,
    plan_of,
)


def loaded(path="model"):
    backend = make_backend(2)
    backend.load(ModelSource(path=path), sampler=make_sampler(3))
    backend.allocate(plan_of())
    return backend


def test_what_is_handed_to_an_executor_can_be_pickled():
    for item in (make_backend, make_sampler, FramingWorker(), RaisingWorker(), QuietWorker(), one_token(1), plan_of()):
        pickle.loads(pickle.dumps(item))


def test_facts_name_path_rank_and_sampler():
    facts = make_backend(2).load(ModelSource(path="model"), sampler=make_sampler(3))
    assert facts.architecture == "model, rank 2, sampler 3"


def test_token_is_computed_when_it_is_submitted():
    backend = loaded()
    backend.submit(one_token(41))
    assert backend.kv_cache()[1][0] == 41


def test_poisoned_batches_fail_in_submit_or_in_wait():
    backend = loaded()
    with pytest.raises(RuntimeError, match="poison in submit"):
        backend.submit(one_token(POISON))
    pending = backend.submit(one_token(POISON + 1))
    with pytest.raises(RuntimeError, match="poison in wait"):
        pending.wait()
    with pytest.raises(BackendError):
        backend.prepare(Bucket(POISON, 1, 1))


def test_close_is_written_down_where_the_path_asks_for_it(tmp_path):
    loaded().close()
    mark = tmp_path / CLOSED
    loaded(str(mark)).close()
    assert mark.read_text() == "closed\n"


def test_framing_worker_sees_what_a_batch_changes():
    backend, worker = loaded(), FramingWorker()
    worker.register(backend.kv_cache())
    worker.begin_step(b"12345")
    backend.submit(one_token(9))
    worker.end_step()
    assert worker.poll().loaded == (5, -1, 9)
    assert worker.poll().loaded == ()


def test_expecting_worker_counts_what_it_was_told_before_a_step():
    worker = ExpectingWorker()
    worker.expect_layers()
    for expected in ((1,), (0,)):
        worker.begin_step(b"")
        assert worker.poll().loaded == expected


def test_gate_holds_a_backend_until_it_is_opened(tmp_path):
    gate = Gate(tmp_path)
    backend = BlockedBackends(gate)(0)
    backend.load(ModelSource(path="m"), sampler=make_sampler(0))
    backend.allocate(plan_of())
    done = threading.Event()
    thread = threading.Thread(target=lambda: (backend.submit(one_token(1)), done.set()))
    thread.start()
    assert not done.is_set()
    gate.open()
    thread.join(60)
    assert done.is_set()
    gate.close()


def test_raising_worker_raises_everywhere_but_at_registration():
    worker = RaisingWorker()
    worker.register(None)
    for call in (lambda: worker.begin_step(b""), worker.end_step, worker.poll, worker.close):
        with pytest.raises(OSError, match="the store is gone"):
            call()
