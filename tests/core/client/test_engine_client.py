from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import attrs
import msgspec
import numpy as np
import pytest

from trencadis.client.engine_client import NO_OUTPUTS, LocalEngineClient, StepOutputs, step_outputs
from trencadis.interfaces import Observer
from trencadis.records import FinishedSequence, FinishReason, TokenDeltas
from trencadis_testing.engines import make_engine


def test_news_are_the_deltas_in_plain_numbers() -> None:
    end = FinishedSequence(
        request_id="a", slot=4, token_ids=np.array([5, 6]), finish_reason=FinishReason.LENGTH, num_prompt_tokens=3
    )
    deltas = TokenDeltas(
        slots=np.array([4, 2], np.int32),
        num_tokens=np.array([2, 1], np.int32),
        token_ids=np.array([5, 6, 7], np.int32),
        finished=(end,),
    )
    outputs = step_outputs(deltas)
    assert (outputs.slots, outputs.num_tokens, outputs.token_ids) == ([4, 2], [2, 1], [5, 6, 7])
    assert all(type(number) is int for number in (*outputs.slots, *outputs.num_tokens, *outputs.token_ids))
    assert outputs.finished == (end,)


def test_nothing_of_the_deltas_is_left_out() -> None:
    assert {*StepOutputs.__struct_fields__} == {field.name for field in attrs.fields(TokenDeltas)} | {"refused"}
    assert not any(msgspec.structs.astuple(NO_OUTPUTS))


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


def test_the_texts_of_all_observers_come_one_after_the_other(client: LocalEngineClient) -> None:
    answers: list[str] = []
    client.request_metrics(answers.append)
    assert [answer.splitlines()[:2] for answer in answers] == [["mine 1", "yours 1"]]
