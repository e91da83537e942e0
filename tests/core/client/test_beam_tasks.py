from __future__ import annotations

import asyncio
from typing import Any

import pytest

from trencadis.client.beam_request import BeamRequest, search_beams, together
from trencadis.errors import EngineEndedError
from trencadis.records import (
    BeamSearchParams,
    CompletionOutput,
    FinishReason,
    ModelFacts,
    RequestOutput,
    TokenLogprobs,
)
from trencadis.text import Tokenizer

MODEL = ModelFacts(
    architecture="Toy",
    dtype="float32",
    vocab_size=4096,
    max_model_len=64,
    eos_token_ids=(),
    num_parameters=1,
    weights_bytes=1,
    kv_bytes_per_token=1,
)


def offered(prompt: Any) -> RequestOutput:
    """Token 10 is always likelier than token 11."""
    entry = TokenLogprobs(
        index=0, position=1, token_id=10, logprob=-0.1, rank=1, top_token_ids=(10, 11), top_logprobs=(-0.1, -2.0)
    )
    one = CompletionOutput(index=0, text="", token_ids=(10,), finish_reason=FinishReason.LENGTH, logprobs=(entry,))
    return RequestOutput(request_id="", prompt=None, prompt_token_ids=prompt, outputs=(one,), finished=True)


def make(tokenizer: Tokenizer) -> BeamRequest:
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    return BeamRequest((1,), params, request_id="r", tokenizer=tokenizer, model=MODEL, max_model_len=64)


def test_every_beam_of_a_round_is_asked_at_once_under_a_name_of_its_own(tokenizer: Tokenizer) -> None:
    asked: list[tuple[str, tuple[int, ...]]] = []
    all_there = asyncio.Event()

    async def ask(prompt: Any, params: Any, name: str) -> RequestOutput:
        asked.append((name, prompt))
        if len(asked) == 3:  # the second round has two: each waits until both were asked
            all_there.set()
        if len(asked) > 1:
            await asyncio.wait_for(all_there.wait(), 10)
        return offered(prompt)

    output = asyncio.run(search_beams(make(tokenizer), ask))
    assert asked[:3] == [("r/0/0", (1,)), ("r/1/0", (1, 10)), ("r/1/1", (1, 11))]
    assert [one.token_ids for one in output.outputs] == [(10, 10, 10), (10, 10, 11)]


def test_if_one_beam_fails_the_others_are_ended_and_its_error_is_raised(tokenizer: Tokenizer) -> None:
    ended: list[str] = []

    async def ask(prompt: Any, params: Any, name: str) -> RequestOutput:
        if name.startswith("r/0"):
            return offered(prompt)
        if name == "r/1/1":
            raise EngineEndedError("the engine has ended.")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)
        raise AssertionError

    with pytest.raises(EngineEndedError, match="has ended"):
        asyncio.run(search_beams(make(tokenizer), ask))
    assert ended == ["r/1/0"]


def test_results_come_in_order_whichever_is_done_first() -> None:
    async def main() -> list[int]:
        first_may_end = asyncio.Event()

        async def first() -> int:
            await first_may_end.wait()
            return 1

        async def second() -> int:
            first_may_end.set()
            return 2

        return await together([first(), second()])

    assert asyncio.run(main()) == [1, 2]


def test_whoever_cancels_ends_all() -> None:
    async def main() -> list[int]:
        ended: list[int] = []
        begun = asyncio.Event()

        async def wait(number: int) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(number)

        task = asyncio.ensure_future(together([wait(1), wait(2)]))
        await begun.wait()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return ended

    assert asyncio.run(main()) == [1, 2]
