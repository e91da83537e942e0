from __future__ import annotations

from trencadis.server.protocol.chat import ChatRequest

MESSAGES = [{"role": "user", "content": "x"}]


def test_the_newer_name_of_the_limit_wins() -> None:
    limits = {"max_tokens": 3, "max_completion_tokens": 5}
    assert ChatRequest.model_validate({"model": "m", "messages": MESSAGES}).most_tokens is None
    assert ChatRequest.model_validate({"model": "m", "messages": MESSAGES, "max_tokens": 3}).most_tokens == 3
    assert ChatRequest.model_validate({"model": "m", "messages": MESSAGES, **limits}).most_tokens == 5
