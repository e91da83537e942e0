from __future__ import annotations

import msgspec
import pytest

from trencadis_server.protocol.answers import Usage, Version
from trencadis_server.protocol.chat import ChunkChoice, Delta
from trencadis_server.protocol.completions import CompletionChoice
from trencadis_server.protocol.json_body import json_response


@pytest.mark.parametrize("num_approximate", [0, 3])
def test_usage_has_the_sum_and_where_the_prompt_came_from(num_approximate: int) -> None:
    usage = Usage.of(prompt_tokens=5, completion_tokens=3, cached_tokens=4, approximate_tokens=num_approximate)
    told = msgspec.to_builtins(usage)
    assert (told["prompt_tokens"], told["completion_tokens"], told["total_tokens"]) == (5, 3, 8)
    assert told["prompt_tokens_details"]["cached_tokens"] == 4
    assert told["prompt_tokens_details"].get("approximate_tokens", 0) == num_approximate
    assert ("approximate_tokens" in told["prompt_tokens_details"]) == bool(num_approximate)
    # Drafts of speculative decoding are no predictions of the client.
    assert told["completion_tokens_details"]["accepted_prediction_tokens"] == 0


def test_records_without_extras_have_the_fields_that_the_official_client_reads() -> None:
    choice = {"index": 0, "logprobs": None, "finish_reason": None}
    assert msgspec.to_builtins(CompletionChoice(index=0, text="x")) == {**choice, "text": "x", "stop_reason": None}
    assert msgspec.to_builtins(ChunkChoice(index=0, delta=Delta())) == {**choice, "delta": {}}
    assert msgspec.to_builtins(Delta(content="x")) == {"content": "x"}
    response = json_response(Version(version="1"))
    assert (response.status_code, response.media_type, response.body) == (200, "application/json", b'{"version":"1"}')
