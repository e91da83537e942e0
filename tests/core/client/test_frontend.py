from __future__ import annotations

import itertools
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
from trencadis_testing.fakes import FakeBackend, fake_text

VOCAB_SIZE = 4096
PROMPT = (5, 6, 7)


@pytest.fixture
def frontend(tokenizer: Tokenizer) -> Iterator[Frontend]:
    backend = FakeBackend(vocab_size=VOCAB_SIZE, eos=-1, max_model_len=128)
    made = Frontend(LocalEngineClient(make_engine(backend=backend)), tokenizer)
    yield made
    made.close()


def reference(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return fake_text(prompt, num_tokens, vocab_size=VOCAB_SIZE)


def drain(frontend: Frontend) -> dict[str, list[RequestOutput]]:
    seen: dict[str, list[RequestOutput]] = {}
    for _ in range(500):
        if not frontend.has_work:
            return seen
        for client in frontend.step():
            seen.setdefault(client.request_id, []).append(client.output())
    raise AssertionError("the engine does not come to rest")


def test_text_and_token_ids_give_the_same_tokens(frontend: Frontend, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello there")
    params = SamplingParams(max_tokens=6)
    by_text = frontend.submit("Hello there", params, request_id="text")
    by_ids = frontend.submit(ids, params, request_id="ids")
    drain(frontend)
    expected = tuple(reference(ids, 6))
    assert by_text.output().outputs[0].token_ids == by_ids.output().outputs[0].token_ids == expected
    assert (by_text.output().prompt, by_ids.output().prompt) == ("Hello there", None)
    assert by_ids.output().outputs[0].text == tokenizer.decode((*ids, *expected))[len("Hello there") :]


def test_a_stream_grows_to_what_the_same_request_without_stream_gives(frontend: Frontend) -> None:
    params = SamplingParams(max_tokens=9)
    frontend.submit(PROMPT, params, request_id="stream", streams=True)
    frontend.submit(PROMPT, params, request_id="plain")
    seen = drain(frontend)
    texts = [output.outputs[0].text for output in seen["stream"]]
    assert len(texts) == 9
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert [output.finished for output in seen["stream"]] == [False] * 8 + [True]
    assert len(seen["plain"]) == 1
    assert seen["plain"][0].outputs == seen["stream"][-1].outputs


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_string_ends_a_request_and_frees_its_slot(tokenizer: Tokenizer, overlap: bool) -> None:
    tokens = reference(PROMPT, 20)
    stop = tokenizer.decode(tokens[4:6])
    backend = FakeBackend(vocab_size=VOCAB_SIZE, eos=-1, max_model_len=128)
    frontend = Frontend(LocalEngineClient(make_engine(backend=backend, async_scheduling=overlap)), tokenizer)
    client = frontend.submit(PROMPT, SamplingParams(max_tokens=20, stop=[stop]), request_id="a")
    drain(frontend)
    output = client.output().outputs[0]
    assert output.stop_reason == stop
    assert output.token_ids == tuple(tokens[:6])
    whole = tokenizer.decode([*PROMPT, *tokens[:6]])
    assert whole == tokenizer.decode(PROMPT) + output.text + stop
    assert frontend.engine.engine.num_running == 0
    assert frontend.live == ()


def test_several_completions_come_back_together(frontend: Frontend) -> None:
    client = frontend.submit(PROMPT, SamplingParams(n=3, max_tokens=4), request_id="a")
    seen = drain(frontend)
    assert len(seen["a"]) == 1
    assert [one.index for one in client.output().outputs] == [0, 1, 2]
    assert all(one.token_ids == tuple(reference(PROMPT, 4)) for one in client.output().outputs)


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


def test_an_aborted_request_keeps_what_it_has(frontend: Frontend) -> None:
    client = frontend.submit(PROMPT, SamplingParams(n=2, max_tokens=50), request_id="a", streams=True)
    for _ in range(6):
        frontend.step()
    num_tokens = len(client.output().outputs[0].token_ids)
    assert num_tokens > 0
    frontend.abort(client)
    frontend.abort(client)
    output = client.output()
    assert output.finished
    assert [one.finish_reason for one in output.outputs] == [FinishReason.ABORT] * 2
    assert len(output.outputs[0].token_ids) == num_tokens
    assert frontend.find("a") is None
    drain(frontend)


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
