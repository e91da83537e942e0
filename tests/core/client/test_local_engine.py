from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from trencadis.client.local_engine import LocalEngineClient
from trencadis.interfaces import Observer
from trencadis.records import EmbeddingRequest, FinishReason, Request, SamplingParams
from trencadis_testing.engines import make_engine


class Measures(Observer):
    def __init__(self, name: str) -> None:
        self.name = name

    def metrics(self) -> str:
        return f"{self.name} 1"


@pytest.fixture
def client() -> Iterator[LocalEngineClient]:
    made = LocalEngineClient(make_engine(observers=[("a", Measures("mine")), ("b", Measures("yours"))]))
    yield made
    made.close()


def test_an_interrupt_ends_the_present_rest_and_the_next_one(client: LocalEngineClient) -> None:
    client.interrupt()
    client.rest()
    threading.Timer(0.05, client.interrupt).start()
    client.rest()
    start_s = time.monotonic()
    client.rest(0.02)
    assert time.monotonic() - start_s >= 0.015


def test_ends_are_known_at_once(client: LocalEngineClient) -> None:
    for name in "ab":
        client.add(Request(request_id=name, prompt_token_ids=(1, 2), params=SamplingParams(max_tokens=9)))
    aborted, stopped = client.abort("a"), client.stop("b")
    assert aborted is not None
    assert stopped is not None
    assert (aborted.finish_reason, stopped.finish_reason) == (FinishReason.ABORT, FinishReason.STOP)
    assert client.abort("a") is None
    assert not client.has_work
    assert not client.is_stalled


def test_texts_are_embedded_in_a_step(client: LocalEngineClient) -> None:
    client.embed(EmbeddingRequest(request_id="e", token_ids=(1, 2)))
    assert client.has_work
    assert [one.request_id for one in client.step().embeddings] == ["e"]


def test_the_texts_of_all_observers_come_one_after_the_other(client: LocalEngineClient) -> None:
    answers: list[str] = []
    client.request_metrics(answers.append)
    assert answers == ["mine 1\nyours 1\n"]
