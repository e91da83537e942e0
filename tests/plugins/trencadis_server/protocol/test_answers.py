from __future__ import annotations

import msgspec

from trencadis_server.protocol.answers import Usage


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
