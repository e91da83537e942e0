from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from trencadis.client.dispatcher import Embed, MetricsRequest, Submission
from trencadis.client.engine_client import LocalEngineClient
from trencadis.client.engine_thread import EngineThread
from trencadis.client.frontend import Frontend
from trencadis.client.output_stream import OutputStream
from trencadis.errors import BackendError, EngineEndedError, ModelLoadError
from trencadis.records import FinishReason, RequestOutput, SamplingParams
from trencadis.text import Tokenizer
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend

VOCAB_SIZE = 4096
PROMPT = (5, 6, 7)


@pytest.fixture
def open_thread(tokenizer: Tokenizer) -> Iterator[Callable[..., EngineThread]]:
    opened = []

    def make(prepare: Callable[[Frontend], None] = lambda _: None) -> EngineThread:
        def frontend() -> Frontend:
            backend = FakeBackend(vocab_size=VOCAB_SIZE, eos=-1, max_model_len=1024)
            made = Frontend(LocalEngineClient(make_engine(backend=backend, num_blocks=512)), tokenizer)
            prepare(made)
            return made

        opened.append(EngineThread(frontend))
        return opened[-1]

    yield make
    for thread in opened:
        thread.close()


def submission(name: str = "a", prompt: object = PROMPT, num_tokens: int = 5, *, streams: bool = True) -> Submission:
    return Submission(
        prompt=prompt,  # type: ignore[arg-type]
        params=SamplingParams(max_tokens=num_tokens),
        request_id=name,
        streams=streams,
        stream=OutputStream(asyncio.get_running_loop()),
    )


async def next_of(stream: OutputStream) -> RequestOutput:
    while (output := stream.take()) is None:
        await stream.changed()
    return output


async def last_of(stream: OutputStream) -> RequestOutput:
    while not (output := await next_of(stream)).finished:
        pass
    return output


class Watched(Frontend):
    """Counts how often somebody asks whether there is work, and says when there is none after some."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        backend = FakeBackend(vocab_size=VOCAB_SIZE, eos=-1, max_model_len=1024)
        super().__init__(LocalEngineClient(make_engine(backend=backend, num_blocks=512)), tokenizer)
        self.num_unanswered = 0

    @property
    def has_work(self) -> bool:
        self.num_unanswered += 1
        return super().has_work


def test_without_work_the_thread_is_blocked(tokenizer: Tokenizer) -> None:
    frontend = Watched(tokenizer)
    thread = EngineThread(lambda: frontend)

    async def read() -> None:
        one = submission()
        thread.send(one)
        await last_of(one.stream)

    asyncio.run(read())
    before = frontend.num_unanswered
    threading.Event().wait(0.2)  # thousands of turns for a thread that does not block
    assert frontend.num_unanswered <= before + 5
    thread.close()


def test_an_abort_ends_the_request_and_its_reader_gets_what_there_is(open_thread: Callable[..., EngineThread]) -> None:
    async def read(thread: EngineThread) -> RequestOutput:
        one = submission(num_tokens=1000)
        thread.send(one)
        await next_of(one.stream)
        thread.abort("a")
        return await last_of(one.stream)

    output = asyncio.run(read(open_thread()))
    assert output.outputs[0].finish_reason is FinishReason.ABORT
    assert 0 < len(output.outputs[0].token_ids) < 1000


def test_an_abort_for_another_stream_of_the_same_name_does_nothing(open_thread: Callable[..., EngineThread]) -> None:
    async def read(thread: EngineThread) -> RequestOutput:
        one = submission(num_tokens=30)
        thread.send(one)
        thread.abort("a", only=OutputStream(asyncio.get_running_loop()))
        thread.abort("nobody")
        return await last_of(one.stream)

    assert asyncio.run(read(open_thread())).outputs[0].finish_reason is FinishReason.LENGTH


def test_a_failure_of_the_engine_reaches_every_waiter_and_every_later_caller(
    open_thread: Callable[..., EngineThread],
) -> None:
    def fail() -> None:
        raise RuntimeError("the bus is on fire")

    def break_it(frontend: Frontend) -> None:
        frontend.step = fail  # type: ignore[method-assign, assignment]

    async def read(thread: EngineThread) -> None:
        both = [submission("a"), submission("b")]
        for one in both:
            try:
                thread.send(one)
            except BackendError:
                one.stream.fail(BackendError("the bus is on fire"))
        for one in both:
            with pytest.raises(BackendError, match="the bus is on fire"):
                await asyncio.wait_for(last_of(one.stream), timeout=20)
        thread.close()
        with pytest.raises(BackendError, match="the bus is on fire"):
            thread.send(submission("c"))
        thread.abort("a")

    thread = open_thread(break_it)
    assert thread.is_alive
    asyncio.run(read(thread))
    assert not thread.is_alive


def test_closing_ends_what_runs_and_refuses_what_comes(open_thread: Callable[..., EngineThread]) -> None:
    async def read(thread: EngineThread) -> RequestOutput:
        one = submission(num_tokens=1000)
        thread.send(one)
        await next_of(one.stream)
        await asyncio.to_thread(thread.close)
        with pytest.raises(BackendError, match="closed"):
            thread.send(submission("b"))
        return await last_of(one.stream)

    thread = open_thread()
    assert asyncio.run(read(thread)).outputs[0].finish_reason is FinishReason.ABORT
    thread.close()


def test_a_request_whose_reader_has_gone_with_its_loop_is_ended(open_thread: Callable[..., EngineThread]) -> None:
    thread = open_thread()

    async def leave() -> None:
        thread.send(submission("gone", num_tokens=1000))

    async def read() -> RequestOutput:
        one = submission("here", num_tokens=30)
        thread.send(one)
        return await last_of(one.stream)

    asyncio.run(leave())
    assert asyncio.run(read()).finished
    assert thread.frontend.find("gone") is None


def test_an_error_while_it_opens_is_raised_to_who_opens_it() -> None:
    def fail() -> Frontend:
        raise ModelLoadError("no such model.")

    with pytest.raises(ModelLoadError, match="no such model"):
        EngineThread(fail)


def test_a_question_that_is_ended_while_it_is_asked_leaves_nothing_behind(
    open_thread: Callable[..., EngineThread],
) -> None:
    thread = open_thread()
    gate = threading.Event()
    held, question = MetricsRequest(), Embed(prompts=[PROMPT], request_id="e")
    held.future.add_done_callback(lambda _: gate.wait(60))  # on the engine's thread: it finds what follows in one go
    thread.send(held)
    thread.send(question)
    thread.abort("e")
    gate.set()
    with pytest.raises(EngineEndedError, match="'e' was ended"):
        question.future.result(60)
    assert thread.dispatcher.num_unanswered == 0
