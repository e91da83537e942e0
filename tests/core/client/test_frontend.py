from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from trencadis.client.engine_client import LocalEngineClient
from trencadis.client.frontend import ClientEmbedding, Frontend
from trencadis.errors import BackendError, InvalidRequestError, PromptTooLongError
from trencadis.records import Embedding, FinishReason, RequestOutput, SamplingParams
from trencadis.text import Tokenizer
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend

VOCAB_SIZE = 4096
PROMPT = (5, 6, 7)


@pytest.fixture
def frontend(tokenizer: Tokenizer) -> Iterator[Frontend]:
    backend = FakeBackend(vocab_size=VOCAB_SIZE, eos=-1, max_model_len=128)
    made = Frontend(LocalEngineClient(make_engine(backend=backend)), tokenizer)
    yield made
    made.close()


def drain(frontend: Frontend) -> dict[str, list[RequestOutput]]:
    seen: dict[str, list[RequestOutput]] = {}
    for _ in range(500):
        if not frontend.has_work:
            return seen
        for client in frontend.step():
            seen.setdefault(client.request_id, []).append(client.output())
    raise AssertionError("the engine does not come to rest")


@pytest.mark.parametrize(
    ("prompt", "error"),
    [(tuple(range(5, 205)), PromptTooLongError), ((VOCAB_SIZE,), InvalidRequestError), ("", InvalidRequestError)],
)
def test_a_bad_request_leaves_nothing_behind(frontend: Frontend, prompt: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        frontend.submit(prompt, SamplingParams(n=2), request_id="a")  # type: ignore[arg-type]
    assert not frontend.has_work
    assert frontend.live == ()


def test_a_live_name_is_refused_and_the_first_request_goes_on(frontend: Frontend) -> None:
    first = frontend.submit(PROMPT, SamplingParams(n=2, max_tokens=3), request_id="a")
    with pytest.raises(InvalidRequestError, match="'a' is live already"):
        frontend.submit(PROMPT, SamplingParams(), request_id="a")
    drain(frontend)
    assert first.output().finished
    frontend.submit(PROMPT, SamplingParams(max_tokens=1), request_id="a")


def test_a_clash_with_the_name_of_a_completion_takes_back_the_whole_request(frontend: Frontend) -> None:
    frontend.submit(PROMPT, SamplingParams(max_tokens=3), request_id="a/1")
    with pytest.raises(InvalidRequestError, match="a/1"):
        frontend.submit(PROMPT, SamplingParams(n=2), request_id="a")
    assert [client.request_id for client in frontend.live] == ["a/1"]
    assert frontend.engine.engine.num_waiting == 1


def test_closing_ends_what_runs_and_refuses_what_comes(frontend: Frontend) -> None:
    client = frontend.submit(PROMPT, SamplingParams(max_tokens=50), request_id="a")
    frontend.close()
    frontend.close()
    assert client.output().outputs[0].finish_reason is FinishReason.ABORT
    with pytest.raises(InvalidRequestError, match="closed"):
        frontend.submit(PROMPT, SamplingParams(), request_id="b")


def vector(name: str, error: str = "") -> Embedding:
    return Embedding(request_id=name, vector=np.zeros(0 if error else 2, np.float32), num_tokens=1, error=error)


def test_vectors_come_in_the_order_of_the_texts_whichever_is_done_first() -> None:
    future: Future[list[Embedding]] = Future()
    client = ClientEmbedding("a", [(1,), (2,), (3,)], future)
    assert [request.request_id for request in client.requests] == ["a/0", "a/1", "a/2"]
    for name in ("a/2", "a/0"):
        client.add(vector(name))
        assert not future.done()
    client.add(vector("a/1"))
    assert [one.request_id for one in future.result()] == ["a/0", "a/1", "a/2"]


def test_one_failure_fails_them_all_and_what_comes_later_is_dropped() -> None:
    future: Future[list[Embedding]] = Future()
    client = ClientEmbedding("a", [(1,), (2,)], future)
    client.add(vector("a/1", error="the device is on fire"))
    with pytest.raises(BackendError, match=r"'a/1' failed: the device is on fire"):
        future.result(0)
    client.add(vector("a/0"))
    client.fail(InvalidRequestError("late"))
    with pytest.raises(BackendError):
        future.result(0)


def test_no_texts_are_answered_at_once() -> None:
    future: Future[list[Embedding]] = Future()
    ClientEmbedding("a", [], future).finish_if_complete()
    assert future.result(0) == []
