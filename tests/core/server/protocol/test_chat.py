from __future__ import annotations

from trencadis.server.protocol.chat import ChatMessage, ChatRequest

MESSAGES = [{"role": "user", "content": "x"}]


def test_the_newer_name_of_the_limit_wins() -> None:
    limits = {"max_tokens": 3, "max_completion_tokens": 5}
    assert ChatRequest.model_validate({"model": "m", "messages": MESSAGES}).most_tokens is None
    assert ChatRequest.model_validate({"model": "m", "messages": MESSAGES, "max_tokens": 3}).most_tokens == 3
    assert ChatRequest.model_validate({"model": "m", "messages": MESSAGES, **limits}).most_tokens == 5


def test_the_limit_knows_its_name() -> None:
    limits = {"max_tokens": 3, "max_completion_tokens": 5}
    assert (
        ChatRequest.model_validate({"model": "m", "messages": MESSAGES, "max_tokens": 3}).most_tokens_field
        == "max_tokens"
    )
    for given in (limits, {}):
        assert ChatRequest(model="m", messages=MESSAGES, **given).most_tokens_field == "max_completion_tokens"


def test_the_document_says_what_a_part_is() -> None:
    (parts,) = [
        one for one in ChatMessage.model_json_schema()["properties"]["content"]["anyOf"] if one["type"] == "array"
    ]
    assert [one["required"] for one in parts["items"]["anyOf"]] == [["type", "text"], ["type", "refusal"]]
