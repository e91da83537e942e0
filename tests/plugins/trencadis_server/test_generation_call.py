from __future__ import annotations

from typing import Any

import pytest

BOTH = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello there"}]}, "messages"),
    ("/v1/completions", {"prompt": "Hello there"}, "prompt"),
]


@pytest.mark.parametrize(("path", "body", "param"), BOTH)
def test_a_stream_and_a_whole_answer_have_the_same_facts(serve: Any, path: str, body: Any, param: str) -> None:
    async def use(api: Any) -> tuple[Any, list[Any]]:
        usage = {"include_usage": True}
        return await api.ok(path, **body, max_tokens=5), await api.events(
            path, **body, max_tokens=5, stream_options=usage
        )

    answer, events = serve(use)
    assert {event["model"] for event in events} == {answer["model"]} == {"demo"}
    assert {event["system_fingerprint"] for event in events} == {answer["system_fingerprint"]}
    assert len({(event["id"], event["created"]) for event in events}) == 1
    assert events[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(("path", "body", "param"), BOTH)
@pytest.mark.parametrize(
    ("fault", "status", "at"),
    [({"model": "none"}, 404, "model"), ({"stream_options": {"include_usage": True}}, 400, "stream_options")],
)
def test_both_endpoints_refuse_the_same(
    serve: Any, path: str, body: Any, param: str, fault: Any, status: int, at: str
) -> None:
    found, error = serve(lambda api: api.error(path, **{**body, **fault}))
    assert (found, error["param"]) == (status, at)


@pytest.mark.parametrize(("path", "body", "param"), BOTH)
def test_an_error_before_the_first_event_names_the_field_of_the_prompt(
    serve: Any, path: str, body: Any, param: str
) -> None:
    found, error = serve(lambda api: api.error(path, **body, stream=True, max_tokens=255))
    assert (found, error["param"], error["code"]) == (400, param, "context_length_exceeded")
