from __future__ import annotations

import msgspec

from trencadis_server.protocol.answers import Usage, Version
from trencadis_server.protocol.chat import ChunkChoice, Delta
from trencadis_server.protocol.completions import CompletionChoice
from trencadis_server.protocol.json_body import json_response


def test_usage_has_the_sum_and_where_the_prompt_came_from() -> None:
    usage = msgspec.to_builtins(Usage.of(prompt_tokens=5, completion_tokens=3, cached_tokens=4))
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 3, 8)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4
    # Drafts of speculative decoding are no predictions of the client.
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == 0


def test_usage_speaks_of_approximate_tokens_only_if_there_are_any() -> None:
    exact, near = (
        msgspec.to_builtins(Usage.of(prompt_tokens=5, completion_tokens=3, cached_tokens=4, approximate_tokens=count))
        for count in (0, 3)
    )
    assert "approximate_tokens" not in exact["prompt_tokens_details"]
    assert near["prompt_tokens_details"]["approximate_tokens"] == 3


def test_a_choice_without_extras_has_the_fields_of_openai() -> None:
    choice = msgspec.to_builtins(CompletionChoice(index=0, text="x"))
    assert choice == {"index": 0, "text": "x", "logprobs": None, "finish_reason": None, "stop_reason": None}


def test_a_delta_has_only_what_it_adds() -> None:
    assert msgspec.to_builtins(Delta(content="x")) == {"content": "x"}
    assert msgspec.to_builtins(Delta()) == {}


def test_a_chunk_says_null_where_the_official_client_reads_an_attribute() -> None:
    choice = msgspec.to_builtins(ChunkChoice(index=0, delta=Delta()))
    assert choice == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}


def test_a_record_is_a_json_object() -> None:
    response = json_response(Version(version="1"))
    assert (response.status_code, response.media_type, response.body) == (200, "application/json", b'{"version":"1"}')
