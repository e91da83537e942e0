from __future__ import annotations

import json
from contextlib import aclosing
from typing import Any

from trencadis.records import RequestTerms, SamplingParams
from trencadis.server.completion_choice import CompletionFormat
from trencadis.server.completion_writer import CompletionWriter
from trencadis.server.generation import Generation, finished_outputs


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
            format=CompletionFormat(tokenizer=api.llm.tokenizer),
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
