from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator

import pytest

from trencadis.client.client_request import ClientRequest
from trencadis.client.engine_client import LocalEngineClient
from trencadis.client.frontend import Frontend
from trencadis.client.llm import ClientStream
from trencadis.records import SamplingParams
from trencadis.text import Tokenizer
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend


@pytest.fixture
def frontend(tokenizer: Tokenizer) -> Iterator[Frontend]:
    backend = FakeBackend(vocab_size=4096, eos=-1, max_model_len=128)
    made = Frontend(LocalEngineClient(make_engine(backend=backend)), tokenizer)
    yield made
    made.close()


def opened(frontend: Frontend, abandoned: deque[ClientRequest], **params: int) -> ClientStream:
    client = frontend.submit((5, 6), SamplingParams(**params), request_id="r", streams=True)
    return ClientStream(client, step=frontend.step, abort=frontend.abort, abandoned=abandoned)


def test_it_yields_each_time_there_is_news_and_the_last_output_is_finished(frontend: Frontend) -> None:
    outputs = list(opened(frontend, deque(), max_tokens=5))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3, 4, 5]
    assert [output.finished for output in outputs] == [False] * 4 + [True]


def test_where_the_best_are_chosen_there_is_one_output(frontend: Frontend) -> None:
    (only,) = opened(frontend, deque(), max_tokens=5, best_of=3)
    assert (only.finished, len(only.outputs), only.num_discarded_tokens) == (True, 1, 10)


def test_closing_ends_the_request(frontend: Frontend) -> None:
    stream = opened(frontend, deque(), max_tokens=100)
    next(stream)
    stream.close()
    assert list(stream) == []
    assert frontend.live == ()


def test_one_that_nobody_reads_is_left_for_whoever_steps_next(frontend: Frontend) -> None:
    abandoned: deque[ClientRequest] = deque()
    stream = opened(frontend, abandoned, max_tokens=100)
    next(stream)
    del stream
    gc.collect()
    assert [client.request_id for client in abandoned] == ["r"]
