from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from support.template_zoo import HOSTILE
from trencadis.client.async_llm import AsyncLLM
from trencadis.client.llm import LLM
from trencadis.config import Config
from trencadis.errors import EngineEndedError, InvalidRequestError, ModelLoadError, UnknownKeyError
from trencadis.interfaces import SchedulingPolicy
from trencadis.records import (
    BeamSearchParams,
    Request,
    RequestOutput,
    RequestTerms,
    SamplingParams,
)
from trencadis.registry import Registry
from trencadis_testing.fakes import fake_embedding, fake_text

VOCAB_SIZE = 4096
FOUR = SamplingParams(max_tokens=4)
LONG = SamplingParams(max_tokens=240)
House = Callable[..., tuple[Config, Registry]]


@pytest.fixture
def run(fake_house: House) -> Callable[[Callable[[AsyncLLM], Awaitable[Any]]], Any]:
    """Runs a coroutine with an engine that is closed after it."""

    def go(use: Callable[[AsyncLLM], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            async with AsyncLLM.from_config(*fake_house()) as llm:
                return await asyncio.wait_for(use(llm), timeout=30)

        return asyncio.run(main())

    return go


def reference(prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    return tuple(fake_text(prompt, num_tokens, vocab_size=VOCAB_SIZE))


async def all_of(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


async def until_idle(llm: AsyncLLM) -> None:
    """Wait until every command before this one was carried out: the engine's thread obeys in order."""
    await all_of(llm.generate((9,), SamplingParams(max_tokens=1)))


def test_outputs_grow_to_what_llm_gives(run: Any, fake_house: House) -> None:
    outputs = run(lambda llm: all_of(llm.generate("Hello there", FOUR)))
    with LLM.from_config(*fake_house()) as llm:
        (expected,) = llm.generate("Hello there", FOUR)
    assert outputs[-1].finished
    assert outputs[-1].outputs == expected.outputs
    texts = [output.outputs[0].text for output in outputs]
    assert all(texts[-1].startswith(text) for text in texts)


def test_many_requests_at_once_do_not_mix(run: Any) -> None:
    prompts = [(5 + i, 6, 7 + i) for i in range(40)]

    async def use(llm: AsyncLLM) -> list[list[RequestOutput]]:
        return await asyncio.gather(*(all_of(llm.generate(prompt, FOUR)) for prompt in prompts))

    for prompt, outputs in zip(prompts, run(use), strict=True):
        assert outputs[-1].outputs[0].token_ids == reference(prompt, 4)


def test_without_streaming_only_the_end_comes(run: Any) -> None:
    outputs = run(lambda llm: all_of(llm.generate((5, 6), FOUR, streams=False)))
    assert [output.finished for output in outputs] == [True]


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_a_reader_that_leaves_frees_the_request(run: Any, how: str) -> None:
    async def use(llm: AsyncLLM) -> None:
        started = asyncio.Event()

        async def read() -> None:
            async for _ in llm.generate((5, 6), LONG, request_id="left"):
                started.set()

        if how == "close":
            outputs: Any = llm.generate((5, 6), LONG, request_id="left")
            await anext(outputs)
            await outputs.aclose()
        else:
            task = asyncio.create_task(read())
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until_idle(llm)
        frontend = llm._runner.frontend
        assert frontend.find("left") is None
        assert frontend.engine.engine.totals.num_emitted_tokens < 240

    run(use)


def test_no_template_holds_up_the_other_requests_of_a_loop(run: Any) -> None:
    async def use(llm: AsyncLLM) -> None:
        loops = {"chat_template": HOSTILE["loops"] + "{# there, where nothing has tried it #}"}
        chat = llm.chat([{"role": "user", "content": "Hello"}], FOUR, template_arguments=loops)
        waiting = asyncio.ensure_future(anext(chat))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not waiting.done()
        assert (await all_of(llm.generate((5, 6), FOUR)))[-1].outputs[0].token_ids == reference((5, 6), 4)
        with pytest.raises(InvalidRequestError, match="ran longer than 2 s and was stopped"):
            await waiting

    run(use)


def test_texts_are_embedded_in_their_order(run: Any) -> None:
    async def use(llm: AsyncLLM) -> list[Any]:
        generating = asyncio.create_task(all_of(llm.generate((5, 6), FOUR)))
        vectors = await llm.embed([(5, 6), (7,)])
        assert (await generating)[-1].outputs[0].token_ids == reference((5, 6), 4)
        return vectors

    vectors = run(use)
    assert [one.num_tokens for one in vectors] == [2, 1]
    assert vectors[1].vector.tolist() == pytest.approx(fake_embedding([7]))


def test_one_bad_text_refuses_its_whole_question_and_leaves_nothing_behind(run: Any) -> None:
    async def use(llm: AsyncLLM) -> None:
        with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
            await llm.embed([(5,), (VOCAB_SIZE,)])
        assert not llm._runner.frontend.has_work

    run(use)


def test_a_cancelled_question_is_forgotten(run: Any) -> None:
    async def use(llm: AsyncLLM) -> None:
        task = asyncio.create_task(llm.embed([(5,)] * 500))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(llm)
        assert not llm._runner.frontend.has_work
        assert not llm._runner.dispatcher.num_unanswered

    run(use)


def test_live_requests_are_counted_and_metrics_answered(run: Any) -> None:
    async def use(llm: AsyncLLM) -> None:
        outputs: Any = llm.generate((5, 6), LONG)
        assert llm.num_live == 0
        await anext(outputs)
        assert llm.num_live == 1
        page = await llm.metrics()
        assert page.startswith(
            '# The engine counts nothing here: no observer shows metrics. Set observer.names to ["prometheus"].\n'
        )
        await outputs.aclose()
        await until_idle(llm)
        assert llm.num_live == 0

    run(use)


def test_a_salt_keeps_the_prefix_cache_apart_and_is_the_tenant_by_default(run: Any) -> None:
    prompt = tuple(range(5, 45))

    async def use(llm: AsyncLLM) -> list[int]:
        found = []
        for tenant, salt in (("a", None), ("a", None), ("b", None), ("b", "a"), ("a", "mine"), ("b", "mine")):
            (output,) = await all_of(llm.generate(prompt, FOUR, tenant=tenant, cache_salt=salt, streams=False))
            found.append(output.num_cached_tokens)
        return found

    first, again, other_tenant, salt_of_a, own_salt, shared_salt = run(use)
    assert first == other_tenant == own_salt == 0
    assert again == salt_of_a == shared_salt > 0


def test_a_closed_engine_refuses_requests(fake_house: House) -> None:
    async def main() -> None:
        llm = AsyncLLM.from_config(*fake_house())
        assert llm.is_alive
        await llm.close()
        await llm.close()
        assert not llm.is_alive
        assert llm.failure == "the engine was closed."
        for ask in (lambda: all_of(llm.generate((5,), FOUR)), lambda: llm.embed([(5,)]), llm.metrics):
            with pytest.raises(EngineEndedError, match="closed"):
                await ask()

    asyncio.run(main())


def test_closing_gives_readers_what_there_is(fake_house: House) -> None:
    async def main() -> RequestOutput:
        llm = AsyncLLM.from_config(*fake_house())
        outputs: Any = llm.generate((5, 6), LONG)
        await anext(outputs)
        closing = asyncio.create_task(llm.close())
        seen = await all_of(outputs)
        await closing
        return seen[-1]

    output = asyncio.run(main())
    assert output.finished
    assert output.outputs[0].token_ids == reference((5, 6), 240)[: len(output.outputs[0].token_ids)]


def test_what_is_wrong_at_the_start_is_raised_by_the_constructor(fake_house: House) -> None:
    with pytest.raises(UnknownKeyError, match="Did you mean"):
        AsyncLLM("demo", enginee={})

    def fail() -> None:
        raise ModelLoadError("no such model.")

    with pytest.raises(ModelLoadError, match="no such model"):
        AsyncLLM.from_config(*fake_house(policy=fail))


def test_terms_reach_the_policy_and_impossible_ones_only_their_reader(fake_house: House) -> None:
    seen: list[Request] = []

    class Notes(SchedulingPolicy):
        def on_added(self, *, slot: int, request: Request) -> None:
            seen.append(request)

    async def main() -> None:
        async with AsyncLLM.from_config(*fake_house(policy=Notes)) as llm:
            with pytest.raises(InvalidRequestError, match="weight = -1 is impossible"):
                await all_of(llm.generate((5,), FOUR, weight=-1))
            assert llm.num_live == 0
            terms = {"weight": 2.0, "ttft_target_s": 0.5, "tpot_target_s": 0.1, "priority": 3, "tenant": "t"}
            await all_of(llm.generate((5,), FOUR, **terms))  # type: ignore[arg-type]
            await all_of(llm.chat([{"role": "user", "content": "Hi"}], FOUR, **terms))  # type: ignore[arg-type]

    asyncio.run(main())
    assert [(one.weight, one.ttft_target_s, one.tpot_target_s, one.priority, one.tenant) for one in seen] == [
        (2.0, 0.5, 0.1, 3, "t")
    ] * 2


def test_beam_search_gives_what_llm_gives(run: Any, fake_house: House) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=3)
    output = run(lambda llm: llm.beam_search("Hello there", params, request_id="mine"))
    with LLM.from_config(*fake_house()) as llm:
        (expected,) = llm.beam_search("Hello there", params)
    assert (output.request_id, output.finished) == ("mine", True)
    assert output.outputs == expected.outputs


def test_cancelling_a_beam_search_ends_its_beams(run: Any) -> None:
    async def use(llm: AsyncLLM) -> int:
        task = asyncio.ensure_future(llm.beam_search((5, 6), BeamSearchParams(max_tokens=200)))
        await until_idle(llm)  # the first round has been sent by then
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(llm)
        return llm.num_live

    assert run(use) == 0


def test_scheduling_parameters_are_one_value_or_given_by_name_but_not_both(run: Any) -> None:
    async def use(llm: AsyncLLM) -> None:
        assert (await all_of(llm.generate((9,), FOUR, terms=RequestTerms(priority=3))))[-1].finished
        with pytest.raises(InvalidRequestError, match="both given"):
            await all_of(llm.generate((9,), FOUR, terms=RequestTerms(), priority=3))

    run(use)
