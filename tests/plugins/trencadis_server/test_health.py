from __future__ import annotations

import types

import pytest

from support.server.server_doubles import OneEngine, app_with, ask, assert_error
from trencadis.errors import BackendError, TrencadisError
from trencadis_server.app import endpoint_routers
from trencadis_server.middleware.drain_guard import DrainGuard


def engine(*, is_alive: bool, failure: str = "", stalled: str = "", off=()):
    async def switched_off():
        if isinstance(off, TrencadisError):
            raise off
        return {"components": list(off)}

    return OneEngine(
        types.SimpleNamespace(is_alive=is_alive, failure=failure, stalled=stalled, switched_off=switched_off)
    )


STALLED = "stalled: step 8123 for 31 s in backend.forward"


@pytest.mark.parametrize(
    ("engines", "is_draining", "status", "reason", "retry_after"),
    [
        (engine(is_alive=True), False, "ok", None, None),
        (None, False, "loading", "The engine is loading.", "5"),
        (engine(is_alive=False, failure="killed by SIGKILL"), False, "ended", "killed by SIGKILL", "1"),
        (engine(is_alive=True, stalled=STALLED), False, "stalled", f"The engine is {STALLED}.", "5"),
        (engine(is_alive=True), True, "draining", "The server is shutting down.", "1"),
    ],
    ids=["ok", "loading", "ended", "stalled", "draining"],
)
@pytest.mark.representatives(5)
def test_a_server_says_whether_it_serves_why_not_and_when_to_ask_again(
    engines, is_draining, status, reason, retry_after
):
    gate = DrainGuard()
    app = app_with(engines=engines, more={"gate": gate})
    if is_draining:
        gate.close()
    for answer in ask(app, ("GET", "/health"), ("GET", "/ready")):
        told = answer.json()
        assert (answer.status_code, told["status"]) == (200 if status == "ok" else 503, status)
        assert told == {"status": "ok"} if status == "ok" else told["error"]["code"] == f"engine_{status}"
        assert (told.get("reason"), answer.headers.get("retry-after")) == (reason, retry_after)


def test_a_ready_server_says_which_components_are_switched_off():
    row = {"component": "scheduling policy mine of package p 1.0", "cause": "took 3 s in split()", "for_s": 57.1}
    for off, shown in (([row], {"off": [row]}), (BackendError("in a long step"), {})):
        (answer,) = ask(app_with(engines=engine(is_alive=True, off=off)), ("GET", "/ready"))
        assert (answer.status_code, answer.json()) == (200, {"status": "ok", **shown})


def test_other_methods_are_refused_in_openais_shape():
    (answer,) = ask(app_with(), ("POST", "/health"))
    assert_error(answer, 405, code="method_not_allowed")


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"model": "fake", "prompt": "a"}), ("/v1/embeddings", {"model": "fake", "input": "a"})],
)
def test_an_engine_that_makes_no_progress_takes_no_new_request(path, body):
    waits = "starting its ranks again, for 7 s now"
    (answer,) = ask(
        app_with(*endpoint_routers(), engines=engine(is_alive=True, stalled=waits)), ("POST", path, {"json": body})
    )
    assert (answer.status_code, answer.headers.get("retry-after")) == (503, "5"), answer.text
    assert answer.json()["error"]["message"].startswith(f"The engine is {waits}.")
