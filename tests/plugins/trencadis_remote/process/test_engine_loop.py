from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from trencadis.client.async_llm import AsyncLLM
from trencadis.client.dispatcher import MetricsRequest, Submission
from trencadis.client.frontend import Frontend
from trencadis.client.output_stream import OutputStream
from trencadis.config import Config
from trencadis.errors import EngineEndedError, InvalidRequestError
from trencadis.records import FinishReason, RequestOutput, SamplingParams
from trencadis.registry import Registry
from trencadis.text import Tokenizer
from trencadis_remote.process.engine_loop import EngineLoop
from trencadis_testing.fakes import fake_text

House = Callable[..., tuple[Config, Registry]]
LONG = SamplingParams(max_tokens=900)


class Served:
    """A loop's client, and a worker on a thread that goes on until it is told to stop."""

    def __init__(self, line: Any, tokenizer: Tokenizer) -> None:
        self.line = line
        self.runner = EngineLoop(Frontend(line.client, tokenizer))
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start_host(self) -> Served:
        self._thread = threading.Thread(target=self._host)
        self._thread.start()
        return self

    def stop_host(self) -> None:
        if self._thread is not None:
            self._stopping.set()
            self._thread.join()
            self._thread = None

    def _host(self) -> None:
        while not self._stopping.is_set() and self.line.worker.turn():
            if not self.line.engine.has_work:
                self.line.far.wait(0.02)
        self.line.peer.end()


@pytest.fixture
def serve(open_line: Callable[..., Any], tokenizer: Tokenizer) -> Iterator[Callable[..., Served]]:
    opened: list[Served] = []

    def make(**options: Any) -> Served:
        opened.append(Served(open_line(never_waits=True, **options), tokenizer))
        return opened[-1]

    yield make
    for served in opened:
        served.stop_host()
        served.runner.close()


async def read(
    runner: EngineLoop, name: str, params: SamplingParams, prompt: Any = (5, 6)
) -> AsyncIterator[RequestOutput]:
    stream = OutputStream(asyncio.get_running_loop())
    runner.send(Submission(prompt=prompt, params=params, request_id=name, streams=True, stream=stream))
    finished = False
    while not finished:
        while (output := stream.take()) is None:
            await asyncio.wait_for(stream.changed(), 20)
        finished = output.finished
        yield output


async def last_of(runner: EngineLoop, name: str, params: SamplingParams = LONG, prompt: Any = (5, 6)) -> RequestOutput:
    async for output in read(runner, name, params, prompt):
        last = output
    return last


def expected(num_tokens: int, prompt: tuple[int, ...] = (5, 6)) -> tuple[int, ...]:
    return tuple(fake_text(prompt, num_tokens, vocab_size=4096))


def test_many_requests_of_one_loop_do_not_mix(serve: Callable[..., Served]) -> None:
    runner = serve().start_host().runner

    async def use() -> list[RequestOutput]:
        params = SamplingParams(max_tokens=20)
        return await asyncio.gather(*(last_of(runner, str(n), params, (5, n)) for n in range(30)))

    for number, output in enumerate(asyncio.run(use())):
        assert output.outputs[0].token_ids == expected(20, (5, number))
    assert runner.dispatcher.num_live == 0


def test_a_refusal_reaches_its_reader_alone(serve: Callable[..., Served]) -> None:
    runner = serve().start_host().runner

    async def use() -> RequestOutput:
        good = asyncio.create_task(last_of(runner, "good", SamplingParams(max_tokens=5)))
        with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
            await last_of(runner, "bad", prompt=(4096,))
        return await good

    assert asyncio.run(use()).outputs[0].token_ids == expected(5)


def test_loops_serve_one_after_the_other_and_end_what_the_last_one_left(serve: Callable[..., Served]) -> None:
    runner = serve().start_host().runner

    async def leave() -> None:
        stream = OutputStream(asyncio.get_running_loop())
        runner.send(Submission(prompt=(5, 6), params=LONG, request_id="left", streams=True, stream=stream))
        await stream.changed()

    asyncio.run(leave())
    assert asyncio.run(last_of(runner, "next", SamplingParams(max_tokens=5))).finished
    assert runner.frontend.find("left") is None
    assert runner.dispatcher.num_live == 0


def test_loops_at_the_same_time_are_all_served_also_after_the_first_has_ended(serve: Callable[..., Served]) -> None:
    runner = serve().start_host().runner
    both_run = threading.Barrier(2, timeout=20)
    first_has_ended = threading.Event()
    results: dict[str, RequestOutput] = {}

    async def use(name: str) -> None:
        results[name] = await last_of(runner, f"{name} alone", SamplingParams(max_tokens=5))
        await asyncio.to_thread(both_run.wait)
        results[f"{name} both"] = await last_of(runner, f"{name} both")
        if name == "second":
            await asyncio.to_thread(first_has_ended.wait, 20)
            results["late"] = await last_of(runner, "late")

    second = threading.Thread(target=lambda: asyncio.run(use("second")))
    second.start()
    asyncio.run(use("first"))
    first_has_ended.set()
    second.join()
    assert {output.outputs[0].token_ids for name, output in results.items() if name in ("first", "second")} == {
        expected(5)
    }
    assert {results[name].outputs[0].token_ids for name in ("first both", "second both", "late")} == {expected(900)}


def test_an_abort_from_another_thread_ends_the_request(serve: Callable[..., Served]) -> None:
    served = serve()

    async def use() -> RequestOutput:
        reading = asyncio.create_task(last_of(served.runner, "a"))
        await asyncio.sleep(0)
        await asyncio.to_thread(served.runner.abort, "a")
        served.start_host()
        return await reading

    output = asyncio.run(use())
    assert output.outputs[0].finish_reason is FinishReason.ABORT
    assert len(output.outputs[0].token_ids) < 900


def test_who_serves_others_never_waits_for_a_host_without_room(serve: Callable[..., Served]) -> None:
    served = serve(room=1)

    async def use() -> list[RequestOutput]:
        params = SamplingParams(max_tokens=2)
        tasks = [asyncio.create_task(last_of(served.runner, str(n), params)) for n in range(300)]
        await asyncio.sleep(0)  # all are sent while the worker receives nothing
        assert served.runner.dispatcher.num_live == 300
        served.start_host()
        return await asyncio.gather(*tasks)

    assert all(output.outputs[0].token_ids == expected(2) for output in asyncio.run(use()))


def test_everybody_is_told_when_the_process_ends_and_later_requests_too(serve: Callable[..., Served]) -> None:
    served = serve()

    async def use() -> None:
        question = MetricsRequest()
        served.runner.send(question)
        waiting = asyncio.create_task(last_of(served.runner, "a"))
        await asyncio.sleep(0)
        served.line.peer.end()
        with pytest.raises(EngineEndedError, match="ended in a test"):
            await waiting
        with pytest.raises(EngineEndedError, match="ended in a test"):
            question.future.result(0)
        with pytest.raises(EngineEndedError, match="ended in a test"):
            await last_of(served.runner, "b")

    asyncio.run(use())
    assert "ended in a test" in served.runner.failure
    served.runner.close()
    assert served.line.peer.was_closed


def test_a_loop_says_that_its_engine_is_stalled(serve: Callable[..., Served]) -> None:
    served = serve()
    assert served.runner.stalled == ""
    served.line.peer.stalled = "stalled: step 3 for 31 s in backend.forward"
    assert served.runner.stalled == "stalled: step 3 for 31 s in backend.forward"
    assert served.runner.is_alive, "it may go on"
    served.line.peer.end()


def test_an_end_that_no_loop_could_see_is_seen_by_who_asks(serve: Callable[..., Served]) -> None:
    served = serve()
    assert served.runner.is_alive
    served.line.peer.end()
    assert not served.runner.is_alive
    assert "ended in a test" in served.runner.failure


def test_a_broken_invariant_on_this_side_ends_everything(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve().start_host()

    def fail(**_: Any) -> None:
        raise RuntimeError("the bus is on fire")

    monkeypatch.setattr(served.runner.frontend, "step", fail)
    with pytest.raises(EngineEndedError, match="the bus is on fire"):
        asyncio.run(last_of(served.runner, "a"))
    assert served.runner.failure == "the bus is on fire"


@pytest.mark.slow
def test_closing_gives_what_there_is_and_refuses_what_comes(process_house: House) -> None:
    async def use() -> RequestOutput:
        llm = AsyncLLM.from_config(*process_house())
        assert isinstance(llm._runner, EngineLoop)
        outputs: Any = llm.generate((5, 6), SamplingParams(max_tokens=15000))
        await anext(outputs)
        closing = asyncio.create_task(llm.close())
        seen = [output async for output in outputs]
        await closing
        with pytest.raises(EngineEndedError, match="closed"):
            await anext(llm.generate((5,)))
        await llm.close()
        return seen[-1]

    output = asyncio.run(use())
    assert output.outputs[0].finish_reason is FinishReason.ABORT
    assert output.outputs[0].token_ids == expected(15000)[: len(output.outputs[0].token_ids)]
