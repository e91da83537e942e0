from __future__ import annotations

import asyncio
from typing import Any

import pytest

from trencadis.client.dispatcher import (
    Abort,
    ControlRequest,
    Embed,
    MetricsRequest,
    RequestDispatcher,
    Submission,
)
from trencadis.client.engine_client import LocalEngineClient
from trencadis.client.frontend import Frontend
from trencadis.client.output_stream import OutputStream
from trencadis.errors import BackendError, EngineEndedError, InvalidRequestError
from trencadis.records import FinishReason, SamplingParams
from trencadis.text import Tokenizer
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend


class House:
    """A dispatcher, its frontend, and a loop that rests unless a test runs it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        backend = FakeBackend(vocab_size=4096, eos=-1, max_model_len=1024)
        self.frontend = Frontend(LocalEngineClient(make_engine(backend=backend, num_blocks=512)), tokenizer)
        self.dispatcher = RequestDispatcher(self.frontend)
        self.loop = asyncio.new_event_loop()

    def submit(self, name: str, prompt: Any = (5, 6), *, loop: asyncio.AbstractEventLoop | None = None) -> OutputStream:
        stream = OutputStream(loop or self.loop)
        params = SamplingParams(max_tokens=50)
        self.dispatcher.register(stream)
        assert self.dispatcher.execute(
            Submission(prompt=prompt, params=params, request_id=name, streams=True, stream=stream)
        )
        return stream

    def told(self) -> None:
        """Let the loop run what was handed to it."""
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()


@pytest.fixture
def house(tokenizer: Tokenizer) -> Any:
    made = House(tokenizer)
    yield made
    made.frontend.close()
    made.loop.close()


def test_outputs_of_other_loops_wait_until_these_run(house: House) -> None:
    stream = house.submit("a")
    house.dispatcher.deliver(house.frontend.step())
    assert stream.take() is None
    house.told()
    output = stream.take()
    assert output is not None
    assert len(output.outputs[0].token_ids) == 1
    assert house.dispatcher.num_live == 1


def test_a_request_at_fault_is_counted_no_more_and_its_reader_told(house: House) -> None:
    stream = house.submit("a", (9999,))
    house.told()
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        stream.take()
    assert house.dispatcher.num_live == 0


def test_an_abort_spares_a_request_whose_outputs_go_elsewhere(house: House) -> None:
    stream = house.submit("a")
    house.dispatcher.execute(Abort(request_id="a", only=OutputStream(house.loop)))
    assert house.frontend.find("a") is not None
    house.dispatcher.execute(Abort(request_id="a", only=stream))
    house.told()
    output = stream.take()
    assert output is not None
    assert output.outputs[0].finish_reason is FinishReason.ABORT
    assert house.dispatcher.num_live == 0


def test_requests_of_a_closed_loop_are_dropped_and_others_kept(house: House) -> None:
    gone = asyncio.new_event_loop()
    house.submit("gone", loop=gone)
    house.submit("here")
    gone.close()
    house.dispatcher.drop_unread()
    assert [client.request_id for client in house.frontend.live] == ["here"]
    assert house.dispatcher.num_live == 1


def test_after_the_end_everybody_who_waits_is_told_why(house: House) -> None:
    end = BackendError("the bus is on fire")
    running, late = house.submit("a"), OutputStream(house.loop)
    house.dispatcher.register(late)
    question, late_question = Embed(prompts=[(5, 6)], request_id="e"), MetricsRequest()
    house.dispatcher.execute(question)
    assert house.dispatcher.num_unanswered == 1
    house.dispatcher.fail_all(end)
    house.dispatcher.reject(
        Submission(prompt=(5,), params=SamplingParams(), request_id="b", streams=True, stream=late), end
    )
    house.dispatcher.reject(late_question, end)
    house.told()
    for waiting in (running.take, late.take, question.future.result, late_question.future.result):
        with pytest.raises(EngineEndedError, match=r"the engine has ended: .*on fire") as caught:
            waiting()
        assert caught.value.__cause__ is end
    assert house.dispatcher.num_live == house.dispatcher.num_unanswered == 0


def test_a_question_is_answered_between_steps_and_what_cannot_be_is_its_own_error(house: House) -> None:
    question, wrong, late = (ControlRequest(name=name) for name in ("scheduling", "nonsense", "scheduling"))
    assert house.dispatcher.execute(question)
    assert house.dispatcher.execute(wrong)
    assert question.future.result()["quarantined"] == []
    assert isinstance(wrong.future.exception(), InvalidRequestError)
    house.dispatcher.reject(late, EngineEndedError("it has ended."))
    assert isinstance(late.future.exception(), EngineEndedError)
    assert house.dispatcher.num_unanswered == 0
