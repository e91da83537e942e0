"""The OpenAPI document against the server: what it allows is answered as it says, and nothing it provokes is a 500."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.internal.conjecture import providers
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from support.core.paced_backend import opener
from support.server.server_doubles import OneEngine, make_context
from trencadis_server.app import make_app
from trencadis_server.context import ServerContext

MAX_MODEL_LEN = 1024


@pytest.fixture(autouse=True)
def the_same_values_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep hypothesis from drawing constants out of the source of imported modules: other tests import some, too.

    There is no setting for it, and derandomizing does not fix them. Its own constants, such as 2**63, stay.
    """
    monkeypatch.setattr(providers, "_get_local_constants", providers.Constants)
    monkeypatch.setattr(providers, "CONSTANTS_CACHE", type(providers.CONSTANTS_CACHE)(1024))


@pytest.fixture(scope="module")
def context() -> Iterator[ServerContext]:
    # Room for every prompt, and every way to sample: then it is the request alone that decides whether it succeeds.
    llm = opener(max_model_len=MAX_MODEL_LEN, num_blocks=MAX_MODEL_LEN, sampling="standard")()
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
    ("GET", "/"),
]


@pytest.mark.slow
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
TIMEOUT_S = 60  # of a busy machine; a request takes milliseconds
MOST_EXAMPLES = 30
TRIED = settings(
    max_examples=MOST_EXAMPLES,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.representatives(1)
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
            # Only an operator can allow these.
            for field in ("weight", "logits_processors"):
                case.body.pop(field, None)
            if path in COMPLETIONS:
                ask_for_one_token(case.body)
            # It cannot say that only an assistant's message may have no content.
            for message in case.body.get("messages") or ():
                if message.get("content") is None:
                    message["content"] = "said"
        statuses.add(case.call_and_validate(checks=CHECKS, timeout=TIMEOUT_S).status_code)

    hold()
    assert statuses & ({400} if mode is NEGATIVE else {404} if "{" in path else {200})


def ask_for_one_token(body: dict[str, Any]) -> None:
    """Set each limit that a body has, and the one that holds without any, to one token."""
    for field in {"max_completion_tokens", "min_tokens"} & body.keys() | {"max_tokens"}:
        body[field] = 1


STRUCTURES = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
REFUSED = {
    *("weight", "logits_processors"),  # an operator allows these
    *("tools", "tool_choice", "functions", "function_call"),  # any value of them asks for what there is not
    *STRUCTURES,  # two of them are an error, and so is text that is no grammar
}


def sound(body: dict[str, Any]) -> dict[str, Any]:
    """Take out of a body what the document allows and the server does not: how fields fit each other, and this model."""
    body = {name: in_64_bits(value) for name, value in body.items() if name not in REFUSED} | {"model": "demo"}
    ask_for_one_token(body)
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


def in_64_bits(value: Any) -> Any:
    """Bring whole numbers, wherever they are in a value, within 64 bits; to JSON Schema 5.0 is one."""
    match value:
        case float() if value.is_integer():
            return in_64_bits(int(value))
        case int() if not isinstance(value, bool):
            return max(-(2**63), min(value, 2**63 - 1))
        case list():
            return [in_64_bits(one) for one in value]
        case dict():
            return {name: in_64_bits(one) for name, one in value.items()}
    return value


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
        "truncate_prompt_tokens",
    ):
        body.pop(field, None)
    if body.get("logprobs") is not True:
        body.pop("top_logprobs", None)


@pytest.mark.slow
@pytest.mark.parametrize("path", COMPLETIONS)
def test_most_of_what_the_document_allows_succeeds_once_the_fields_go_together(
    api: schemathesis.BaseSchema, path: str
) -> None:
    num_tried, refusals = 0, []

    @given(case=api[path]["POST"].as_strategy(generation_mode=POSITIVE))
    @TRIED
    def hold(case: schemathesis.Case) -> None:
        nonlocal num_tried
        case.body = sound(case.body)
        answer = case.call_and_validate(checks=CHECKS, timeout=TIMEOUT_S)
        num_tried += 1
        if answer.status_code != 200:
            refusals.append(answer.text)

    hold()
    assert num_tried == MOST_EXAMPLES
    assert len(refusals) <= MOST_EXAMPLES // 10, refusals


def test_nothing_is_left_behind(context: ServerContext) -> None:
    assert (context.admission.num_requests, context.admission.num_waiting_tokens) == (0, 0)
    assert context.llm.num_live == 0
