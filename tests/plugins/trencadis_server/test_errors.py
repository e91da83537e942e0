from __future__ import annotations

import json

import pytest

from trencadis.errors import (
    BackendError,
    ConfigError,
    ContinuationError,
    EngineEndedError,
    InternalError,
    InvalidRequestError,
    PromptTooLongError,
    RequestRefusedError,
    StepFailedError,
    WrongRoleError,
)
from trencadis_server.errors import ApiError, EngineUnavailableError, TooBusyError, as_api_error, retry_headers


@pytest.mark.parametrize(
    ("error", "status", "type_", "code"),
    [
        (InvalidRequestError("top_p = 7"), 400, "invalid_request_error", None),
        (PromptTooLongError("too long"), 400, "invalid_request_error", "context_length_exceeded"),
        (RequestRefusedError("full"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (TooBusyError("full", retry_after_s=3.2), 429, "rate_limit_error", "rate_limit_exceeded"),
        (
            EngineUnavailableError("loads", state="loading", retry_after_s=5),
            503,
            "service_unavailable_error",
            "engine_loading",
        ),
        (EngineEndedError("killed by SIGKILL"), 503, "service_unavailable_error", "engine_ended"),
        (ContinuationError("no other can go on"), 503, "service_unavailable_error", "engine_ended"),
        (WrongRoleError("it is prefill."), 503, "service_unavailable_error", "wrong_role"),
        (StepFailedError("bucketing raised"), 503, "server_error", "engine_error"),
        (BackendError("device"), 503, "server_error", "engine_error"),
        (InternalError("state"), 500, "server_error", "internal_error"),
        (ConfigError("secret path"), 500, "server_error", "internal_error"),
        (KeyError("secret"), 500, "server_error", "internal_error"),
    ],
)
def test_each_error_has_its_status_type_and_code(error, status, type_, code):
    found = as_api_error(error, request_id="req_1")
    assert (found.status, found.type, found.code) == (status, type_, code)
    assert set(found.body()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("error", [KeyError("secret"), InternalError("secret"), ConfigError("secret")])
def test_an_unexpected_error_tells_the_request_id_and_nothing_else(error):
    message = as_api_error(error, request_id="req_1").message
    assert "req_1" in message
    assert "secret" not in message


def test_the_field_of_the_prompt_is_named_where_the_prompt_is_too_long_else_the_one_that_an_error_knows():
    assert as_api_error(PromptTooLongError("x"), param="messages").param == "messages"
    assert as_api_error(InvalidRequestError("x"), param="messages").param is None
    assert as_api_error(InvalidRequestError("x", field="min_tokens"), param="messages").param == "min_tokens"


def test_an_api_error_stays_as_it_is():
    error = ApiError(404, "no such model", param="model", code="model_not_found")
    assert as_api_error(error) is error


@pytest.mark.parametrize(("seconds", "written"), [(0.0, "1"), (0.2, "1"), (3.2, "4"), (60.0, "60")])
def test_retry_after_is_whole_seconds_rounded_up(seconds, written):
    assert retry_headers(seconds) == {"x-should-retry": "true", "Retry-After": written}


def test_clients_are_told_not_to_try_again_when_it_is_no_use():
    for error in (EngineUnavailableError("failed", state="failed"), WrongRoleError("it is prefill.")):
        assert as_api_error(error).headers == {"x-should-retry": "false"}
    assert as_api_error(ContinuationError("no other can go on")).headers == retry_headers(1)


def test_half_a_surrogate_pair_in_a_message_is_encoded():
    assert json.loads(ApiError(400, "\ud800 é").encoded())["error"]["message"] == "\ud800 é"
