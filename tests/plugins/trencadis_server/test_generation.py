from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from trencadis.errors import EngineEndedError
from trencadis.records import CompletionOutput, RequestOutput, RequestTerms, SamplingParams
from trencadis_server.generation.generation import Generation, answer_id, finished_outputs, usage_of


def generation(api: Any, prompts: list[tuple[int, ...]], **params: Any) -> Generation:
    return Generation(
        llm=api.llm,
        admission=api.admission,
        answer_id=answer_id("test"),
        prompts=prompts,
        params=SamplingParams(**params),
        terms=RequestTerms(),
    )


def test_the_hold_lasts_as_long_as_the_outputs_and_waits_until_each_prompt_has_a_token(serve: Any) -> None:
    async def use(api: Any) -> list[tuple[int, int]]:
        admission = api.admission
        async with aclosing(generation(api, [(5, 6, 7), (8,)], n=3, max_tokens=30).outputs(streams=True)) as outputs:
            counts = [(admission.num_requests, admission.num_waiting_tokens) async for _ in outputs]
        return [*counts, (admission.num_requests, admission.num_waiting_tokens)]

    *during, last, after = serve(use)
    assert {num_requests for num_requests, _ in during} == {6}
    assert (last, after) == ((6, 0), (0, 0))


def test_long_prompts_stop_waiting_with_the_first_token_also_if_the_answer_comes_in_one_piece(serve: Any) -> None:
    is_decoding, may_go_on = threading.Event(), threading.Event()
    decodes = []

    def fails(batch: Any, one: Any) -> None:
        decodes.append(int(one.query_lens.max()) == 1)
        if sum(decodes) == 5:
            is_decoding.set()
            may_go_on.wait(timeout=20)

    async def use(api: Any) -> tuple[int, int]:
        task = asyncio.create_task(finished_outputs(generation(api, [(5, 6) * 600], max_tokens=9)))
        await asyncio.to_thread(is_decoding.wait, 20)
        waiting = api.admission.num_waiting_tokens
        may_go_on.set()
        (output,) = await task
        return waiting, len(output.outputs[0].token_ids)

    assert serve(use, fails=fails, max_model_len=2048) == (0, 9)


def test_what_somebody_else_ended_is_no_answer(serve: Any) -> None:
    async def use(api: Any) -> None:
        one = generation(api, [(5, 6)], max_tokens=250)
        async with aclosing(one.outputs(streams=True)) as outputs:
            async for _ in outputs:
                api.llm.abort(f"{one.answer_id}-0")

    with pytest.raises(EngineEndedError, match="before its output was complete"):
        serve(use)


def test_many_prompts_are_handed_to_the_engine_in_several_turns_of_the_event_loop(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(api: Any) -> Counter[int]:
        turn, begun = 0, Counter[int]()
        generate = api.llm.generate

        async def noted(*args: Any, **terms: Any) -> AsyncIterator[RequestOutput]:
            begun[turn] += 1
            async for output in generate(*args, **terms):
                yield output

        async def count() -> None:
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        monkeypatch.setattr(api.llm, "generate", noted)
        counting = asyncio.create_task(count())
        await finished_outputs(generation(api, [(5, 6)] * 100, max_tokens=1))
        counting.cancel()
        return begun

    begun = serve(use)
    assert begun.total() == 100
    assert max(begun.values()) <= 32, "others of the event loop wait until all are handed over"


def test_usage_counts_every_choice_and_each_prompt_once() -> None:
    def output(num_prompt: int, num_approximate: int, *counts: int) -> RequestOutput:
        return RequestOutput(
            request_id="r",
            prompt=None,
            prompt_token_ids=(1,) * num_prompt,
            outputs=tuple(CompletionOutput(index=i, text="", token_ids=(1,) * count) for i, count in enumerate(counts)),
            finished=True,
            num_cached_tokens=2,
            num_approximate_tokens=num_approximate,
        )

    usage = usage_of([output(3, 3, 4, 5), output(6, 1, 1)])
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (9, 10, 19)
    assert (usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens_details.approximate_tokens) == (4, 4)
    assert usage_of([output(3, 0, 4)], counts_output=False).completion_tokens == 0
