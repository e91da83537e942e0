"""Sequences that wait for their sampler: nothing else does, they count as waiting, and they can be ended."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from trencadis.client.engine_client import LocalEngineClient
from trencadis.clock import SystemClock
from trencadis.engine.engine import Engine
from trencadis.errors import InvalidRequestError, RequestRefusedError
from trencadis.interfaces import Observer
from trencadis.records import FinishedSequence, FinishReason, Request, SamplingParams
from trencadis_plugins.observer.prometheus import PrometheusObserver
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text

PROMPT = tuple(range(1, 11))


class Slow:
    """A sampler's preparation: requests with a seed wait for it."""

    def __init__(self, num_each: int = 1) -> None:
        self.begun: list[tuple[Future[Any], ...]] = []
        self.tenants: list[str] = []
        self.num_each = num_each

    def __call__(self, params: SamplingParams, tenant: str) -> tuple[Future[Any], ...]:
        if params.seed is None:
            return ()
        self.tenants.append(tenant)
        self.begun.append(tuple(Future() for _ in range(self.num_each)))
        return self.begun[-1]


def request(name: str, *, slow: bool = False, tenant: str = "", max_tokens: int = 8) -> Request:
    params = SamplingParams(max_tokens=max_tokens, seed=1 if slow else None)
    return Request(request_id=name, prompt_token_ids=PROMPT, params=params, tenant=tenant)


def open_engine(slow: Any, **options: Any) -> Engine:
    return make_engine(backend=FakeBackend(eos=-1, max_model_len=256), prepare=slow, clock=SystemClock(), **options)


def state_of(engine: Engine, name: str) -> str:
    (answer,) = engine.answer("explain", {"request_id": name})["requests"]
    return str(answer["state"])


def test_others_go_on_step_after_step_while_one_is_compiling() -> None:
    slow = Slow()
    observer = PrometheusObserver()
    engine = open_engine(slow, explain_steps=200, observers=[("prometheus", observer)])
    engine.add(request("other", max_tokens=100))
    engine.add(request("poison", slow=True, tenant="a"))
    assert slow.tenants == ["a"]
    assert not engine.is_stalled
    num_tokens = sum(len(engine.step().token_ids) for _ in range(60))
    assert num_tokens >= 59
    assert state_of(engine, "poison") == "compiling"
    assert engine.num_waiting == 1
    engine.metrics()
    shown = observer.snapshot()
    assert (shown["trencadis_compiling_sequences"], shown["trencadis_waiting_sequences"]) == (1, 1)
    slow.begun[0][0].set_exception(InvalidRequestError("no text is of this kind.", field="structured"))
    ended = drain(engine)
    assert ended["other"].token_ids.tolist() == fake_text(PROMPT, 100, eos=-1)
    refusal = ended["poison"].refusal
    assert isinstance(refusal, InvalidRequestError)
    assert refusal.field == "structured"
    assert ended["poison"].finish_reason is FinishReason.ERROR
    (answer,) = engine.answer("explain", {"request_id": "poison"})["requests"]
    assert [span["outcome"] for span in answer["spans"]] == ["compiling", "failed"]


def test_what_is_prepared_runs_and_what_it_has_is_kept_until_it_ends() -> None:
    slow = Slow(num_each=2)
    engine = open_engine(slow)
    engine.add(request("one", slow=True))
    first, second = slow.begun[0]
    act = engine.stage("preparation").before_step
    assert act in engine._stages.before_step
    second.set_result("kept")
    assert not len(engine.step().slots)
    assert engine.is_stalled
    first.set_result(None)
    engine.step()
    (kept,) = engine.stage("preparation")._futures.values()
    assert [future.result() for future in kept] == [None, "kept"]
    assert act not in engine._stages.before_step
    assert drain(engine)["one"].token_ids.tolist() == fake_text(PROMPT, 8, eos=-1)
    assert not engine.has_work


def test_one_that_is_ended_meanwhile_cancels_its_preparation_and_leaves_nothing() -> None:
    slow = Slow()
    engine = open_engine(slow, tenants={"a": {"max_waiting": 1}})
    for _ in range(3):  # its tenant may have one that waits: each end makes room
        engine.add(request("one", slow=True, tenant="a"))
        with pytest.raises(RequestRefusedError, match="may have 1"):
            engine.add(request("two", tenant="a"))
        finished = engine.abort("one")
        assert finished is not None
        assert finished.finish_reason is FinishReason.ABORT
        assert slow.begun[-1][0].cancelled()
    assert not engine.stage("preparation")._done
    engine.step()
    assert (engine.num_waiting, engine.has_work) == (0, False)


def test_what_is_known_at_once_is_refused_at_once_and_other_errors_do_not_end_the_engine() -> None:
    def prepare(params: SamplingParams, tenant: str) -> tuple[Future[Any], ...]:
        if tenant == "raises":
            raise ZeroDivisionError("by nought")
        future: Future[Any] = Future()
        future.set_exception(InvalidRequestError("no") if tenant == "known" else ValueError("broken"))
        return (future,)

    engine = open_engine(prepare)
    with pytest.raises(InvalidRequestError, match="no"):
        engine.add(request("a", tenant="known"))
    for tenant, words in (("raises", "ZeroDivisionError: by nought"), ("fails", "ValueError: broken")):
        with pytest.raises(RequestRefusedError, match=words):
            engine.add(request("a", tenant=tenant))
    assert not engine.has_work


def test_a_client_hears_a_late_refusal_as_it_would_hear_one_at_once() -> None:
    slow = Slow()
    client = LocalEngineClient(open_engine(slow))
    client.add(request("one", slow=True))
    slow.begun[0][0].set_exception(InvalidRequestError("no"))
    news = client.step()
    assert not news.finished
    assert [(name, str(error)) for name, error in news.refused] == [("one", "no")]


def test_an_engine_that_rests_is_woken_when_a_sequence_is_ready() -> None:
    slow = Slow()
    engine = open_engine(slow)
    woken = threading.Event()
    engine.wake_by(woken.set)
    engine.add(request("one", slow=True))
    thread = threading.Thread(target=slow.begun[0][0].set_result, args=(None,))
    thread.start()
    assert woken.wait(30)
    thread.join()
    assert set(drain(engine)) == {"one"}


def test_under_a_simulated_clock_it_waits_so_that_each_run_is_the_same() -> None:
    slow = Slow()

    def prepare(params: SamplingParams, tenant: str) -> tuple[Future[Any], ...]:
        (future,) = slow(params, tenant)
        threading.Thread(target=future.set_result, args=(None,)).start()
        return (future,)

    engine = make_engine(backend=FakeBackend(eos=-1), prepare=prepare)
    engine.add(request("one", slow=True))
    assert slow.begun[0][0].done()
    assert len(engine.step().token_ids) == 1


def test_observers_see_one_that_was_refused_late() -> None:
    class Seen(Observer):
        def __init__(self) -> None:
            self.requests: list[FinishedSequence] = []

        def on_request(self, finished: FinishedSequence) -> None:
            self.requests.append(finished)

    slow, observer = Slow(), Seen()
    engine = open_engine(slow, observers=[("recording", observer)])
    engine.add(request("one", slow=True))
    slow.begun[0][0].set_exception(InvalidRequestError("no"))
    engine.step()
    assert [(one.request_id, one.error) for one in observer.requests] == [("one", "no")]


def test_a_tenant_whose_grammars_fail_and_take_long_is_refused_new_ones_for_a_while() -> None:
    slow = Slow()
    engine = open_engine(slow)
    engine.add(request("other", max_tokens=60, tenant="b"))
    for _ in range(2):
        engine.add(request("poison", slow=True, tenant="a/ann"))
        refusal = InvalidRequestError("takes too long")
        refusal.cost_s = 6.0
        slow.begun[-1][0].set_exception(refusal)
        engine.step()
    with pytest.raises(RequestRefusedError, match="what tenant 'a' wanted to have prepared") as caught:
        engine.add(request("poison", slow=True, tenant="a/bob"))
    assert 30 < caught.value.retry_after_s <= 40
    assert slow.begun[-1][0].cancelled()
    engine.add(request("plain", tenant="a"))
    engine.add(request("of another", slow=True, tenant="b"))
    slow.begun[-1][0].set_result(None)
    assert set(drain(engine)) == {"other", "plain", "of another"}
