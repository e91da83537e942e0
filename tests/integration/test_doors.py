"""One path with several doors: the engine on this thread, on another, or in a process of its own, which may die or hang."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trencadis import LLM, AsyncLLM, BeamSearchParams, RequestOutput, SamplingParams, StructuredOutput
from trencadis.errors import BackendError, EngineEndedError, InvalidRequestError, RequestRefusedError
from trencadis.records import FinishReason
from trencadis_testing.fakes import fake_embedding, fake_text

pytestmark = pytest.mark.slow

KIT = "trencadis_testing."
LONG = SamplingParams(max_tokens=150_000)
BEAMS = BeamSearchParams(beam_width=3, max_tokens=3, ignore_eos=True)
OPTIONS = {"vocab_size": 4096, "eos": -1, "max_model_len": 200_000, "strict": False}


def tables(**more: Any) -> dict[str, Any]:
    """Tables of a fake engine in a process of its own, ready within a second."""
    return {
        "engine": {"placement": "process", "warmup": False, **more.pop("engine", {})},
        "backend": {"name": f"{KIT}fakes:FakeBackend", "options": OPTIONS},
        "executor": {"name": f"{KIT}fake_executor:FakeExecutor"},
        "sampling": {"name": "support.core.remote_parts:FakesSampler"},
        "bucketing": {"name": f"{KIT}engines:ExactShapes", "fallback": ""},
        "cache": {"num_blocks": 65_536, "block_size": 16},
        "observer": {"names": ["support.core.remote_parts:StepCounter"]},
        **more,
    }


def run(use: Callable[[AsyncLLM], Awaitable[Any]], **more: Any) -> Any:
    """Run a coroutine with an engine in a process of its own, closed after it."""

    async def main() -> Any:
        async with AsyncLLM("demo", **tables(**more)) as llm:
            return await asyncio.wait_for(use(llm), timeout=60)

    return asyncio.run(main())


@pytest.fixture(scope="module")
def run_shared() -> Iterator[Callable[[Callable[[AsyncLLM], Awaitable[Any]]], Any]]:
    """Runs coroutines like :func:`run`, all with one engine, which each must leave at rest."""
    with asyncio.Runner() as runner:
        llm = AsyncLLM("demo", **tables())
        yield lambda use: runner.run(asyncio.wait_for(use(llm), timeout=60))
        runner.run(llm.close())


def child_of(llm: Any) -> int:
    frontend = llm._runner.frontend if isinstance(llm, AsyncLLM) else llm._frontend
    pid: int = frontend.engine._transport._peer.pid
    return pid


def cpu_s(pid: int) -> float:
    return time.clock_gettime((~pid << 3) | 2)


async def last_of(llm: AsyncLLM, prompt: Any, params: SamplingParams, **more: Any) -> RequestOutput:
    async for output in llm.generate(prompt, params, **more):
        last = output
    return last


# ---------------------------------------------------------------------------------------------------------- equality

PROMPTS = [f"The old man number {number} looked at the sea and" for number in range(11)]
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0.0),
    SamplingParams(max_tokens=24, seed=3),
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=40, temperature=0.0, stop=["e", "a"]),
    SamplingParams(max_tokens=8, temperature=0.0, logprobs=3, prompt_logprobs=2),
    SamplingParams(max_tokens=16, n=2, seed=1),
    SamplingParams(max_tokens=16, top_p=0.8, stop=["the"], include_stop_str_in_output=True),
    *(
        SamplingParams(max_tokens=100, seed=seed, structured=wanted)
        for seed, wanted in enumerate(
            (
                StructuredOutput.json_schema({"type": "array", "items": {"type": "integer"}, "maxItems": 3}),
                StructuredOutput.regex(r"[A-Z][a-z ]{3,20}\. [0-9]{3}"),
                StructuredOutput.choice(["the sea", "the old man", "neither"]),
                StructuredOutput.grammar('root ::= "(" root ")" | [a-z]{1,8}'),
            )
        )
    ),
]


def facts(outputs: list[RequestOutput]) -> Any:
    """What must be equal to the bit, and the log-probabilities, which depend on what shares a batch in the last bits."""
    plain = [
        msgspec.structs.replace(
            output,
            request_id="",
            prompt_logprobs=None,
            num_cached_tokens=0,
            outputs=tuple(msgspec.structs.replace(one, logprobs=None) for one in output.outputs),
        )
        for output in outputs
    ]
    asked = [
        entry for output in outputs for entry in (*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ()))
    ]
    return plain, [entry.logprob for entry in asked], [entry.top_token_ids for entry in asked]


def test_the_same_requests_give_the_same_tokens_through_every_door() -> None:
    with LLM("demo", engine={"warmup": False}) as llm:
        plain, logprobs, top = facts(llm.generate(PROMPTS, PARAMS))
    with LLM("demo", engine={"placement": "process", "warmup": False}) as llm:
        there = facts(llm.generate(PROMPTS, PARAMS))
        pid = child_of(llm)
    assert not Path(f"/proc/{pid}").exists()

    async def online() -> list[RequestOutput]:
        async with AsyncLLM("demo", engine={"placement": "thread", "warmup": False}) as engine:
            # The same names, from which unseeded requests draw.
            return await asyncio.gather(
                *(
                    last_of(engine, prompt, params, request_id=str(number))
                    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))
                )
            )

    for found in (there, facts(asyncio.run(online()))):
        assert found[0] == plain
        assert found[1] == pytest.approx(logprobs, abs=1e-4)
        assert found[2] == top
    stopped = [output for output, params in zip(plain, PARAMS, strict=True) if params.stop]
    assert any(output.outputs[0].finish_reason is FinishReason.STOP for output in stopped)


# ------------------------------------------------------------------------------------------------------- the surface


def test_streams_metrics_embeddings_beams_and_totals_come_from_the_other_process(
    run_shared: Callable[..., Any],
) -> None:
    async def use(llm: AsyncLLM) -> None:
        outputs = [output async for output in llm.generate((5, 6), SamplingParams(max_tokens=30))]
        assert outputs[-1].outputs[0].token_ids == tuple(fake_text((5, 6), 30, vocab_size=4096))
        assert outputs[-1].finished
        assert (await llm.metrics()).startswith("num_steps ")
        vectors = await llm.embed([(5, 6), "Hello", (7,)])
        assert [one.num_tokens for one in vectors][::2] == [2, 1]
        assert vectors[2].vector.tolist() == pytest.approx(fake_embedding([7]))
        for text in ((), (4096,)):
            with pytest.raises(InvalidRequestError):
                await llm.embed([(5,), text])
        before = await llm.totals()
        found = await llm.beam_search((5, 6), BEAMS)
        assert [one.token_ids for one in found.outputs] == [(0, 0, 0), (0, 0, 1), (0, 0, 2)]
        assert (await llm.totals())["num_emitted_tokens"] - before["num_emitted_tokens"] == 1 + 3 + 3
        assert (llm.num_live, llm.is_alive, llm.failure) == (0, True, "")

    run_shared(use)


def test_a_reader_that_leaves_ends_its_request_there(run_shared: Callable[..., Any]) -> None:
    async def use(llm: AsyncLLM) -> None:
        outputs: Any = llm.generate((5, 6), LONG, request_id="left")
        await anext(outputs)
        assert llm.num_live == 1
        await outputs.aclose()
        while llm.num_live:
            await last_of(llm, (9,), SamplingParams(max_tokens=1))
        assert await llm.metrics() != ""
        assert not llm._runner.frontend.has_work

    run_shared(use)


def test_an_interrupt_of_the_terminal_is_the_parents_to_handle_and_a_process_at_rest_uses_no_processor(
    run_shared: Callable[..., Any],
) -> None:
    async def use(llm: AsyncLLM) -> None:
        assert os.getsid(child_of(llm)) != os.getsid(0)
        os.kill(child_of(llm), signal.SIGINT)
        assert (await last_of(llm, (5,), SamplingParams(max_tokens=3))).finished
        before = time.process_time(), cpu_s(child_of(llm))
        await asyncio.to_thread(threading.Event().wait, 1.0)
        assert time.process_time() - before[0] < 0.3  # threads that other tests left behind included
        assert cpu_s(child_of(llm)) - before[1] < 0.1

    run_shared(use)


def test_offline_a_refusal_from_there_ends_its_prompt_or_is_raised_and_names_it() -> None:
    prompts = [(5, number) for number in range(20)]
    with LLM("demo", **tables(scheduling={"name": "support.core.remote_parts:AtMostTwo", "fallback": ""})) as llm:
        with pytest.raises(RequestRefusedError, match=r"prompts\[\d+\]: .*two wait already"):
            llm.generate(prompts, SamplingParams(max_tokens=500), on_refusal="raise")
        outputs = llm.generate(prompts, SamplingParams(max_tokens=20))
        assert {one.outputs[0].finish_reason for one in outputs} == {FinishReason.LENGTH, FinishReason.IGNORED}
        assert all("two wait already" in one.error for one in outputs if one.error)
        with pytest.raises(InvalidRequestError, match=r"prompts\[1\]: .*vocabulary"):
            llm.beam_search([(5,), (4096,)], BEAMS)
        assert len(llm.generate((5, 6), SamplingParams(max_tokens=4))[0].outputs[0].token_ids) == 4
        before = llm.totals()["num_emitted_tokens"]
        (found,) = llm.beam_search([(5, 6)], BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True))
        assert [one.token_ids for one in found.outputs] == [(0, 0, 0), (0, 0, 1)]
        assert llm.totals()["num_emitted_tokens"] - before == 1 + 2 + 2


# ---------------------------------------------------------------------------------------------------- death and hang


async def ended(llm: AsyncLLM) -> str:
    """Wait until the engine's end is known."""
    while llm.is_alive:
        await asyncio.sleep(0)
    await asyncio.to_thread(llm._runner._closed.wait, 30)
    return llm.failure


@pytest.mark.representatives(1)
@pytest.mark.parametrize("is_busy", [False, True])
def test_when_the_engine_dies_everybody_is_told_why_also_when_nothing_runs(is_busy: bool) -> None:
    async def use(llm: AsyncLLM) -> None:
        streams: list[Any] = [llm.generate((5, n), LONG) for n in range(5 * is_busy)]
        for stream in streams:
            await anext(stream)
        os.kill(child_of(llm), signal.SIGSEGV if is_busy else signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineEndedError, match="killed by SIGSEGV"):
                async for _ in stream:
                    pass
        killed = "the engine's process was killed by SIGKILL; often the kernel ran out of memory."
        assert await ended(llm) == killed or is_busy
        assert llm.num_live == 0
        for ask in (lambda: last_of(llm, (5,), LONG), llm.metrics, lambda: llm.embed([(5,)])):
            with pytest.raises(EngineEndedError, match="SIGSEGV" if is_busy else "SIGKILL"):
                await ask()

    run(use)


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "killed by SIGKILL"), (signal.SIGSTOP, "hung: no progress")]
)
def test_offline_the_end_of_an_engine_that_is_killed_or_stopped_is_raised(number: int, words: str) -> None:
    llm = LLM("demo", **tables(engine={"watchdog_s": 1.0}))
    stream = llm.stream((5, 6), LONG)
    next(stream)
    os.kill(child_of(llm), number)
    for ask in (lambda: list(stream), lambda: llm.generate((5, 6))):
        with pytest.raises(EngineEndedError, match=words):
            ask()
    llm.close()
    llm.close()


def test_an_engine_that_hangs_is_killed() -> None:
    async def use(llm: AsyncLLM) -> None:
        pid = child_of(llm)
        with pytest.raises(
            EngineEndedError, match=r"hung: no progress .* \(\[engine\] watchdog_s = 1\); it was killed"
        ):
            await last_of(llm, (5, 6), LONG)
        assert "hung" in await ended(llm)
        assert not Path(f"/proc/{pid}").exists()

    stopping = {"name": "support.core.remote_parts:stopping_backend", "options": OPTIONS}
    run(use, engine={"watchdog_s": 1.0}, backend=stopping)


@pytest.mark.nightly
def test_an_engine_that_is_stopped_while_it_rests_goes_on_if_it_is_let_go_in_time() -> None:
    async def use(llm: AsyncLLM) -> None:
        os.kill(child_of(llm), signal.SIGSTOP)
        with pytest.raises(BackendError, match=r"did not answer within 0\.3 s"):
            await llm.metrics(timeout_s=0.3)
        assert llm.is_alive
        os.kill(child_of(llm), signal.SIGCONT)
        assert await llm.metrics(timeout_s=30) != ""

    run(use)


def test_an_engine_that_is_stopped_while_it_rests_is_killed_without_any_request() -> None:
    async def use(llm: AsyncLLM) -> None:
        os.kill(child_of(llm), signal.SIGSTOP)
        # It may not have come to rest yet when it is stopped.
        assert re.search(r"hung: no progress in step 0 for .* s in (loading|requests|idle) ", await ended(llm))

    run(use, engine={"watchdog_s": 1.0})


def test_an_engine_that_fails_says_so_before_it_ends() -> None:
    async def use(llm: AsyncLLM) -> None:
        with pytest.raises(EngineEndedError, match="the engine failed: a broken invariant of a test"):
            await last_of(llm, (5, 6), LONG)

    run(use, executor={"name": "support.core.remote_parts:BrokenExecutor"})
