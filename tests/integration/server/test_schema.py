"""The OpenAPI document against the server: what it allows is answered as it says, and nothing it provokes is a 500."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

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


COMPLETIONS = ("/v1/chat/completions", "/v1/completions")
MOST_EXAMPLES = 30
TRIED = settings(
    max_examples=MOST_EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize(("mode", "method", "path"), TRIALS)
def test_no_request_that_the_document_allows_or_forbids_breaks_the_server(
    api: schemathesis.BaseSchema, mode: schemathesis.GenerationMode, method: str, path: str
) -> None:
    operation = api[path][method]
    statuses: set[int] = set()

    @given(case=operation.as_strategy(generation_mode=mode))
    @TRIED
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
    if mode is NEGATIVE or path not in COMPLETIONS:  # how many of those succeed is looked at below
        assert statuses & ({400} if mode is NEGATIVE else {404} if "{" in path else {200})


STRUCTURES = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
REFUSED = {
    *("weight", "adapter", "logits_processors"),  # an operator allows these
    *("tools", "tool_choice", "functions", "function_call"),  # any value of them asks for what there is not
    *STRUCTURES,  # two of them are an error, and so is text that is no grammar
}


def sound(body: dict[str, Any]) -> dict[str, Any]:
    """Take out of a body what the document allows and the server does not: how fields fit each other, and this model."""
    body = {name: integral(value) for name, value in body.items() if name not in REFUSED} | {"model": "demo"}
    for field in {"max_tokens", "max_completion_tokens", "min_tokens"} & body.keys():
        body[field] = 1
    for field in {"allowed_token_ids", "stop_token_ids", "prompt", "tokens"} & body.keys():
        body[field] = within_vocabulary(body[field])
    if isinstance(body.get("logit_bias"), dict):
        biases = [bias for key, bias in body["logit_bias"].items() if key.isascii() and key.isdecimal()]
        body["logit_bias"] = {str(index): bias for index, bias in enumerate(biases)}
    for message in body.get("messages") or ():
        # The demo's template has three roles, and only an assistant's message may have no content.
        message["role"] = message["role"] if message["role"] in {"user", "assistant", "system"} else "user"
        message["content"] = message.get("content") or "said"
    if "prompt" in body:
        body["prompt"] = body["prompt"] or "said"  # of a list of prompts, nothing is left
    apart(body)
    return {name: value for name, value in body.items() if value is not None}


def integral(value: Any) -> Any:
    """To JSON Schema 5.0 is an integer."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return [integral(one) for one in value] if isinstance(value, list) else value


def within_vocabulary(value: Any) -> Any:
    """Return token ids that the model has, in the place of any."""
    if isinstance(value, list):
        return [one % 4096 for one in value[:16] if isinstance(one, int)]
    return value


def apart(body: dict[str, Any]) -> None:
    """Take out fields that do not go together."""
    if body.get("stream") is not True:
        body.pop("stream_options", None)
    for field in (
        "use_beam_search",
        "length_penalty",
        "early_stopping",
        "best_of",
        "prompt_logprobs",
        "continue_final_message",
        "echo",
    ):
        body.pop(field, None)
    if body.get("logprobs") is not True:
        body.pop("top_logprobs", None)


@pytest.mark.parametrize("path", COMPLETIONS)
def test_what_the_document_allows_can_succeed_once_the_fields_go_together(
    api: schemathesis.BaseSchema, path: str
) -> None:
    statuses: Counter[int] = Counter()

    @given(case=api[path]["POST"].as_strategy(generation_mode=POSITIVE))
    @TRIED
    def hold(case: schemathesis.Case) -> None:
        case.body = sound(case.body)
        statuses[case.call_and_validate(checks=CHECKS).status_code] += 1

    hold()
    # How many succeed varies with the modules that other tests have imported: hypothesis takes constants from them.
    assert statuses[200], statuses


def test_nothing_is_left_behind(context: ServerContext) -> None:
    assert (context.admission.num_requests, context.admission.num_waiting_tokens) == (0, 0)
    assert context.llm.num_live == 0
