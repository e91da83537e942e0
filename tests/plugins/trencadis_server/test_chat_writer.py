from __future__ import annotations

import json
from contextlib import aclosing
from typing import Any

import pytest

from trencadis.records import RequestTerms, SamplingParams
from trencadis_server.generation.chat_writer import ChatWriter
from trencadis_server.generation.generation import Generation, finished_outputs
from trencadis_server.protocol.chat import ChatRequest


@pytest.mark.parametrize("n", [1, 3])
def test_each_choice_has_one_opening_one_end_and_its_text_between(serve: Any, n: int) -> None:
    async def use(api: Any) -> tuple[Any, list[Any]]:
        generation = Generation(
            llm=api.llm,
            admission=api.admission,
            answer_id="chatcmpl-1",
            prompts=[(5, 6)],
            params=SamplingParams(max_tokens=9, n=n),
            terms=RequestTerms(),
        )
        writer = ChatWriter(
            answer_id="chatcmpl-1",
            created=3,
            model="m",
            fingerprint="fp_1",
            tokenizer=api.llm.tokenizer,
            body=ChatRequest(model="m", messages=[{"role": "user", "content": "a"}], return_token_ids=True),
        )
        (output,) = await finished_outputs(generation)
        data = b""
        async with aclosing(writer.stream(generation, includes_usage=False, is_continuous=False)) as events:
            async for event in events:
                data += event
        return writer.whole(output), [json.loads(one.removeprefix(b"data: ")) for one in data.split(b"\n\n") if one]

    whole, events = serve(use)
    assert [event.get("prompt_token_ids") for event in events] == [[5, 6], *[None] * (len(events) - 1)]
    for choice in whole.choices:
        mine = [one for event in events for one in event["choices"] if one["index"] == choice.index]
        assert [one["delta"].get("role") for one in mine] == ["assistant", *[None] * (len(mine) - 1)]
        assert [one["finish_reason"] for one in mine] == [*[None] * (len(mine) - 1), "length"]
        assert "".join(one["delta"].get("content", "") for one in mine) == choice.message.content
        assert [token for one in mine for token in one.get("token_ids", ())] == choice.token_ids
