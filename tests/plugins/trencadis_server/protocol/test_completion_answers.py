from __future__ import annotations

import msgspec

from trencadis_server.protocol.completion_answers import CompletionChoice


def test_a_choice_without_extras_has_the_fields_of_openai() -> None:
    choice = msgspec.to_builtins(CompletionChoice(index=0, text="x"))
    assert choice == {"index": 0, "text": "x", "logprobs": None, "finish_reason": None, "stop_reason": None}
