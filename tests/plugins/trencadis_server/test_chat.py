from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import msgspec

from trencadis.text import Tokenizer, encode_chat
from trencadis_server.protocol.chat import ChatChunk, ChatCompletion
from trencadis_testing.fakes import fake_text

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello there"}]


def reference(tokenizer: Tokenizer, num_tokens: int, messages: Any = HELLO) -> tuple[int, ...]:
    return tuple(fake_text(encode_chat(tokenizer, messages), num_tokens, vocab_size=4096))


def joined(events: list[Any], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def test_the_answer_is_the_engines_text_with_exact_usage(serve: Any, tokenizer: Tokenizer) -> None:
    answer = serve(lambda api: api.ok(PATH, messages=HELLO, max_completion_tokens=6, max_tokens=3))
    msgspec.convert(answer, ChatCompletion)
    (choice,) = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": tokenizer.decode(reference(tokenizer, 6), skip_special_tokens=True),
        "refusal": None,
    }
    assert choice["finish_reason"] == "length"
    num_prompt_tokens = len(encode_chat(tokenizer, HELLO))
    assert answer["usage"]["prompt_tokens"] == num_prompt_tokens
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["total_tokens"] == num_prompt_tokens + 6
    assert answer["model"] == "demo"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["system_fingerprint"].startswith("fp_")


def test_a_stream_says_what_the_whole_answer_says(serve: Any, tokenizer: Tokenizer) -> None:
    async def use(api: Any) -> tuple[Any, list[Any]]:
        body = {
            "messages": HELLO,
            "max_tokens": 24,
            "n": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "return_token_ids": True,
        }
        return await api.ok(PATH, **body), await api.events(PATH, **body, stream_options={"include_usage": True})

    whole, events = serve(use)
    for event in events:
        msgspec.convert(event, ChatChunk)
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    prompt = list(encode_chat(tokenizer, HELLO))
    assert [event.get("prompt_token_ids") for event in events] == [prompt, *[None] * (len(events) - 1)]
    assert whole["prompt_token_ids"] == prompt
    *chunks, last = events
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], whole["usage"]["completion_tokens"])
    assert all(chunk["usage"] is None for chunk in chunks)
    for index, expected in enumerate(whole["choices"]):
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert mine[-1]["delta"] == {}
        assert [choice["finish_reason"] for choice in mine] == [*[None] * (len(mine) - 1), "length"]
        assert [token for choice in mine for token in choice.get("token_ids", ())] == expected["token_ids"]
        assert tuple(expected["token_ids"]) == reference(tokenizer, 24)
        assert joined(chunks, index) == expected["message"]["content"]
        entries = [entry for choice in mine if choice["logprobs"] for entry in choice["logprobs"]["content"]]
        assert entries == expected["logprobs"]["content"]


def test_a_stop_string_across_tokens_never_gets_out_in_part(serve: Any, tokenizer: Tokenizer) -> None:
    tokens = reference(tokenizer, 40)
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    first, second = (tokenizer.decode([token]) for token in tokens[10:12])
    stop = first[-2:] + second[:2]
    expected = text[: text.index(stop)]

    async def use(api: Any) -> tuple[Any, list[Any]]:
        body = {"messages": HELLO, "max_tokens": 40, "stop": stop}
        return await api.ok(PATH, **body), await api.events(PATH, **body)

    whole, events = serve(use)
    assert len(stop) > 1
    assert whole["choices"][0]["message"]["content"] == joined(events) == expected
    assert whole["choices"][0]["finish_reason"] == events[-1]["choices"][0]["finish_reason"] == "stop"
    assert whole["choices"][0]["stop_reason"] == stop


def test_no_chunk_has_part_of_a_character(serve: Any, tokenizer: Tokenizer) -> None:
    events = serve(lambda api: api.events(PATH, messages=HELLO, max_tokens=200, return_token_ids=True))
    tokens = [token for event in events for choice in event["choices"] for token in choice.get("token_ids", ())]
    assert tuple(tokens) == reference(tokenizer, 200)
    # Random bytes decode to replacement characters too, so the whole is the oracle: a split character would add some.
    assert joined(events) == tokenizer.decode(tokens, skip_special_tokens=True)


def test_without_a_limit_the_answer_fills_the_model(serve: Any, tokenizer: Tokenizer) -> None:
    answer = serve(lambda api: api.ok(PATH, messages=HELLO), max_model_len=64)
    assert answer["usage"]["total_tokens"] == 64


def test_truncation_keeps_the_end_of_the_prompt(serve: Any, tokenizer: Tokenizer) -> None:
    long = [{"role": "user", "content": "x y " * 300}]
    body = {"messages": long, "max_tokens": 6, "return_token_ids": True}

    async def use(api: Any) -> tuple[Any, Any]:
        return await api.ok(PATH, **body, truncate_prompt_tokens=10), await api.ok(
            PATH, **body, truncate_prompt_tokens=-1
        )

    ten, most = serve(use)
    prompt = encode_chat(tokenizer, long)
    assert tuple(ten["prompt_token_ids"]) == prompt[-10:]
    assert tuple(most["prompt_token_ids"]) == prompt[-250:]


def test_a_failure_before_the_first_token_has_a_status_of_its_own_also_in_a_stream(serve: Any) -> None:
    def fails(batch: Any, one: Any) -> None:
        raise RuntimeError("planted")

    async def use(api: Any) -> Any:
        response = await api.post(PATH, messages=HELLO, stream=True)
        return response.status_code, response.json()["error"]

    status, error = serve(use, fails=fails)
    assert status == 500
    assert "planted" in error["message"]


def test_a_failure_in_mid_stream_is_an_event(serve: Any) -> None:
    has_begun = threading.Event()
    passes = []

    def fails(batch: Any, one: Any) -> None:
        passes.append(one)
        if len(passes) > 5:
            assert has_begun.wait(timeout=20)
            raise RuntimeError("planted")

    async def on_event(data: str) -> bool:
        has_begun.set()
        return False

    events = serve(lambda api: api.watch(PATH, on_event, messages=HELLO, max_tokens=200), fails=fails)
    assert '"role":"assistant"' in events[0]
    assert "planted" in json.loads(events[-2].removeprefix("data: "))["error"]["message"]
    assert events[-1] == "data: [DONE]\n\n"


def test_a_client_that_leaves_ends_its_requests_and_frees_every_block(serve: Any) -> None:
    may_go_on = threading.Event()
    passes = []

    def fails(batch: Any, one: Any) -> None:
        passes.append(one)
        if len(passes) > 5:  # so that the engine cannot be done before the client has left
            may_go_on.wait(timeout=20)

    async def on_event(data: str) -> bool:
        return True

    async def use(api: Any) -> tuple[int, int, int]:
        await api.watch(PATH, on_event, messages=HELLO, max_tokens=200, n=3)
        may_go_on.set()
        num_used, num_emitted = await api.until_idle()
        return num_used, num_emitted, api.llm.num_live

    num_used, num_emitted, num_live = serve(use, fails=fails)
    assert num_emitted < 200
    assert (num_used, num_live) == (0, 0)


def test_a_client_that_leaves_before_a_whole_answer_ends_its_request(serve: Any) -> None:
    has_begun, may_go_on = threading.Event(), threading.Event()

    def fails(batch: Any, one: Any) -> None:
        has_begun.set()
        may_go_on.wait(timeout=20)

    async def use(api: Any) -> int:
        task = asyncio.create_task(api.leave(PATH, has_begun, messages=HELLO, max_tokens=200))
        assert await task == 499
        may_go_on.set()
        await api.until_idle()
        return int(api.llm.num_live)

    assert serve(use, fails=fails) == 0


def test_many_streams_at_once_do_not_mix(serve: Any, tokenizer: Tokenizer) -> None:
    chats = [[{"role": "user", "content": f"number {i}"}] for i in range(32)]

    async def use(api: Any) -> list[list[Any]]:
        return await asyncio.gather(*(api.events(PATH, messages=chat, max_tokens=12) for chat in chats))

    for chat, events in zip(chats, serve(use), strict=True):
        expected = reference(tokenizer, 12, chat)
        assert joined(events) == tokenizer.decode(expected, skip_special_tokens=True)
