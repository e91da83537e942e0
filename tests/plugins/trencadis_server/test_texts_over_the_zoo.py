"""Every path on which text goes in and out, over tokenizers of every kind. The tokens of the output are as good as random."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.broken_tokenizers import panics_at_texts
from support.tokenizer_zoo import ZOO, over_the_zoo, zoo_tokenizer

PATH = "/v1/completions"
PROMPT = "abc hello"
NUM_TOKENS = 60


def in_zoo(name: str, tmp_path: Path) -> dict[str, Any]:
    """Return the engine for an entry; its model has some ids that the tokenizer has not."""
    directory = ZOO[name].make(tmp_path / name)
    model = json.loads((tmp_path / name / "config.json").read_text(encoding="utf-8"))
    return {"tokenizer": directory, "vocab_size": max(512, model["vocab_size"] + 8)}


@over_the_zoo
def test_texts_are_the_same_streamed_and_whole_stop_where_they_should_and_have_all_alternatives(
    serve: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    tokenizer = zoo_tokenizer(name)
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "logprobs": 50, "return_token_ids": True}

    async def use(api: Any) -> Any:
        whole = (await api.ok(PATH, **body))["choices"][0]
        events = [event["choices"][0] for event in await api.events(PATH, **body)]
        stop = whole["text"][len(whole["text"]) // 2 :][:3]
        stopped = (await api.ok(PATH, **body, stop=stop))["choices"][0]
        return whole, events, stop, stopped, (await api.ok(PATH, **body, echo=True))["choices"][0]

    whole, events, stop, stopped, echoed = serve(use, **in_zoo(name, tmp_path))
    prompt, ids, written = tokenizer.encode(PROMPT), whole["token_ids"], whole["logprobs"]
    prompt_text = tokenizer.decode(prompt, skip_special_tokens=True)
    assert whole["text"] == tokenizer.decode([*prompt, *ids], skip_special_tokens=True).removeprefix(prompt_text)
    assert "".join(event["text"] for event in events) == whole["text"]
    assert stop
    assert (stopped["text"], stopped["stop_reason"]) == (whole["text"].partition(stop)[0], stop)
    assert [len(one) for one in written["top_logprobs"]] == [50 if token < 50 else 51 for token in ids]
    assert all(token in one for token, one in zip(written["tokens"], written["top_logprobs"], strict=True))
    offsets = [*written["text_offset"], len(whole["text"])]
    assert offsets == sorted(offsets)
    for token, start, end in zip(ids, offsets, offsets[1:], strict=False):
        text = tokenizer.token_bytes(token)
        if token not in tokenizer.special_token_ids and text.isascii() and end > start:
            assert text.decode().strip().removesuffix("@@") in whole["text"][start:end]
    echoed_offsets = echoed["logprobs"]["text_offset"][len(prompt) :]
    assert echoed_offsets == [len(prompt_text) + one for one in written["text_offset"]]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"prompt": "Hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/tokenize", {"prompt": "Hello"}),
    ],
)
def test_a_tokenizer_that_panics_is_an_error_in_words(
    serve: Callable[..., Any], tmp_path: Path, path: str, body: Any
) -> None:
    async def use(api: Any) -> Any:
        failed = await api.error(path, **body)
        return failed, await api.ok(PATH, prompt=[5, 6], max_tokens=2)

    (status, error), fine = serve(use, tokenizer=panics_at_texts(tmp_path))
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert "the tokenizer failed" in error["message"]
    assert "PanicException: chunk size must be non-zero" in error["message"]
    assert fine["choices"][0]["finish_reason"] == "length"
