"""The OpenAPI document against the server: what it allows is answered as it says, and nothing it provokes is a 500."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from paced_backend import opener
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from server_doubles import OneEngine, make_context

from trencadis.server.app import make_app
from trencadis.server.context import ServerContext


@pytest.fixture(scope="module")
def context() -> Iterator[ServerContext]:
    llm = opener(max_model_len=64)()
    context = make_context(OneEngine(llm))
    context.model_names = ("demo",)
    yield context
    asyncio.run(llm.close())


@pytest.fixture(scope="module")
def api(context: ServerContext) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_asgi("/openapi.json", make_app(context))


CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/version"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
]


def test_every_operation_of_the_document_is_tried(api: schemathesis.BaseSchema) -> None:
    operations = [found.ok() for found in api.get_all_operations()]
    assert {(one.method.upper(), one.path) for one in operations} == set(OPERATIONS)


POSITIVE, NEGATIVE = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
TRIALS = [
    *((POSITIVE, method, path) for method, path in OPERATIONS),
    # There is nothing in the others to be wrong.
    *((NEGATIVE, method, path) for method, path in OPERATIONS if method == "POST"),
]


@pytest.mark.parametrize(("mode", "method", "path"), TRIALS)
def test_no_request_that_the_document_allows_or_forbids_breaks_the_server(
    api: schemathesis.BaseSchema, mode: schemathesis.GenerationMode, method: str, path: str
) -> None:
    operation = api[path][method]
    statuses: set[int] = set()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=30,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def hold(case: schemathesis.Case) -> None:
        # A model's name out of thin air would be all that the server looks at.
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = "demo"
        if mode is POSITIVE and isinstance(case.body, dict):
            # What this server allows nobody, and more tokens than the model has room for.
            for field in ("weight", "adapter", "logits_processors"):
                case.body.pop(field, None)
            for field in {"max_tokens", "max_completion_tokens", "min_tokens"} & case.body.keys():
                case.body[field] = 1
            # It cannot say that only an assistant's message may have no content.
            for message in case.body.get("messages") or ():
                if message.get("content") is None:
                    message["content"] = "said"
        statuses.add(case.call_and_validate(checks=CHECKS).status_code)

    hold()
    assert statuses & ({400} if mode is NEGATIVE else {404} if "{" in path else {200})


def test_nothing_is_left_behind(context: ServerContext) -> None:
    assert (context.admission.num_requests, context.admission.num_waiting_tokens) == (0, 0)
    assert context.llm.num_live == 0
