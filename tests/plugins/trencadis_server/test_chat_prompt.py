from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from trencadis.text import Tokenizer, encode_chat
from trencadis_server.fair_threads import FairThreads
from trencadis_server.generation.chat_prompt import encode_messages
from trencadis_server.protocol.chat import ChatMessage


class Shows(Tokenizer):
    """The real tokenizer with another template."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        super().__init__(tokenizer._hf)
        self._template = template

    @property
    def chat_template(self) -> str:
        return self._template


def encode(tokenizer: Tokenizer, *messages: Any, **options: Any) -> tuple[int, ...]:
    parsed = [ChatMessage(**message) for message in messages]
    return asyncio.run(encode_messages(parsed, tokenizer=tokenizer, encoder=FairThreads(), **options))


def seen(tokenizer: Tokenizer, *messages: Any, comment: str = "", **options: Any) -> dict[str, Any]:
    """Return what reached a template."""
    template = "{{ {'messages': messages, 'think': think | default(none), 'opens': add_generation_prompt} | tojson }}"
    shows = Shows(tokenizer, template + comment)
    return json.loads(tokenizer.decode(encode(shows, *messages, **options)))


def test_text_and_parts_of_text_are_the_same_message(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
    expected = encode_chat(tokenizer, [{"role": "user", "content": "Hello\nthere"}])
    assert encode(tokenizer, {"role": "user", "content": parts}) == expected


def test_the_developer_is_the_system_where_the_template_knows_no_other(tokenizer: Tokenizer) -> None:
    message = {"role": "developer", "content": "Be brief."}
    assert encode(tokenizer, message) == encode_chat(tokenizer, [{**message, "role": "system"}])
    assert seen(tokenizer, message)["messages"][0]["role"] == "system"
    assert seen(tokenizer, message, comment="{# developer #}")["messages"][0]["role"] == "developer"


def test_tool_calls_reach_the_template_with_their_arguments_parsed(tokenizer: Tokenizer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    first, second = seen(
        tokenizer,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "f"},
    )["messages"]
    assert first["tool_calls"] == [{**call, "function": {"name": "f", "arguments": {"x": 1}}}]
    assert first["content"] == ""
    assert second == {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "f"}


@pytest.mark.parametrize(
    ("options", "opens", "think"),
    [
        ({}, True, None),
        ({"add_generation_prompt": False}, False, None),
        ({"template_arguments": {"think": True}}, True, True),
    ],
)
def test_options_reach_the_template(tokenizer: Tokenizer, options: Any, opens: bool, think: bool | None) -> None:
    told = seen(tokenizer, {"role": "user", "content": "x"}, **options)
    assert (told["opens"], told["think"]) == (opens, think)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_reaches_the_template_under_each_of_its_names(tokenizer: Tokenizer, name: str) -> None:
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", name: "because"}]
    (_, told) = seen(tokenizer, *turns)["messages"]
    assert {told["reasoning"], told["reasoning_content"], told["thinking"]} == {"because"}


def test_the_final_message_is_continued_where_it_ends(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]
    tokens = encode(tokenizer, *messages, continue_final_message=True)
    assert tokenizer.decode(tokens).endswith("Good day")


def test_the_event_loop_does_not_wait_for_a_template(tokenizer: Tokenizer) -> None:
    async def use() -> None:
        shows = Shows(tokenizer, "{{ messages[0].content }}{# here, where nothing has tried it #}")
        message = ChatMessage(role="user", content="x")
        encoding = asyncio.ensure_future(encode_messages([message], tokenizer=shows, encoder=FairThreads()))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not encoding.done()
        assert tokenizer.decode(await encoding) == "x"

    asyncio.run(use())
