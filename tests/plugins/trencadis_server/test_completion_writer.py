from __future__ import annotations

import json
from contextlib import aclosing
from typing import Any

import msgspec

from trencadis.records import CompletionOutput, FinishReason, RequestOutput, RequestTerms, SamplingParams, TokenLogprobs
from trencadis.text import Tokenizer
from trencadis_server.generation.completion_writer import CompletionWriter
from trencadis_server.generation.generation import Generation, finished_outputs
from trencadis_server.protocol.completions import CompletionRequest


def test_events_of_several_prompts_are_together_the_whole_answer(serve: Any) -> None:
    async def use(api: Any) -> tuple[Any, list[Any]]:
        generation = Generation(
            llm=api.llm,
            admission=api.admission,
            answer_id="cmpl-1",
            prompts=[(5, 6), (7, 8, 9)],
            params=SamplingParams(max_tokens=6, n=2),
            terms=RequestTerms(),
        )
        writer = CompletionWriter(
            answer_id="cmpl-1",
            created=3,
            model="m",
            fingerprint="fp_1",
            tokenizer=api.llm.tokenizer,
            body=CompletionRequest(model="m", prompt=[[5, 6], [7, 8, 9]]),
            echoes=["one: ", None],
        )
        whole = writer.whole(await finished_outputs(generation))
        data = b""
        async with aclosing(writer.stream(generation, includes_usage=True, is_continuous=False)) as events:
            async for event in events:
                data += event
        return whole, [json.loads(line.removeprefix(b"data: ")) for line in data.split(b"\n\n") if line]

    whole, events = serve(use)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.text.startswith("one: ") for choice in whole.choices] == [True, True, False, False]
    for choice in whole.choices:
        mine = [one for event in events for one in event["choices"] if one["index"] == choice.index]
        assert "".join(one["text"] for one in mine) == choice.text
    assert events[-1]["usage"]["completion_tokens"] == whole.usage.completion_tokens == 24
    assert {(event["id"], event["created"], event["model"]) for event in events} == {("cmpl-1", 3, "m")}


def test_log_probabilities_of_a_prompt_are_written_once_for_all_its_choices(tokenizer: Tokenizer) -> None:
    prompt = tuple(tokenizer.encode("a € b"))

    def whole(num_choices: int) -> Any:
        output = RequestOutput(
            request_id="r",
            prompt=None,
            prompt_token_ids=prompt,
            outputs=tuple(
                CompletionOutput(
                    index=index,
                    text="b",
                    token_ids=(prompt[-1],),
                    finish_reason=FinishReason.LENGTH,
                    logprobs=(_entry(len(prompt), prompt[-1]),),
                )
                for index in range(num_choices)
            ),
            finished=True,
            prompt_logprobs=tuple(_entry(position, token) for position, token in enumerate(prompt) if position),
        )
        body = CompletionRequest(model="m", prompt=list(prompt), logprobs=1, prompt_logprobs=1)
        writer = CompletionWriter(
            answer_id="cmpl-1",
            created=3,
            model="m",
            fingerprint="fp_1",
            tokenizer=tokenizer,
            body=body,
            echoes=["a € b"],
        )
        return writer.whole([output]).choices

    (alone,), (first, second) = whole(1), whole(2)
    assert second.prompt_logprobs is first.prompt_logprobs
    assert second.logprobs.top_logprobs[1] is first.logprobs.top_logprobs[1]
    written = [msgspec.json.encode(msgspec.structs.replace(one, index=0)) for one in (alone, first, second)]
    assert written[0] == written[1] == written[2]


def _entry(position: int, token: int) -> TokenLogprobs:
    return TokenLogprobs(
        index=0, position=position, token_id=token, logprob=-1.0, rank=1, top_token_ids=(80,), top_logprobs=(-0.5,)
    )
