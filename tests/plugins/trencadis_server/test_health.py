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


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_a_server_with_an_engine_is_well(path):
    (answer,) = ask(app_with(engines=engine(is_alive=True)), ("GET", path))
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_a_ready_server_says_which_components_are_switched_off():
    row = {"component": "scheduling policy mine of package p 1.0", "cause": "took 3 s in split()", "for_s": 57.1}
    (answer,) = ask(app_with(engines=engine(is_alive=True, off=[row])), ("GET", "/ready"))
    assert (answer.status_code, answer.json()) == (200, {"status": "ok", "off": [row]})
    (answer,) = ask(app_with(engines=engine(is_alive=True, off=BackendError("in a long step"))), ("GET", "/ready"))
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_a_server_that_loads_says_so_and_when_to_ask_again(path):
    (answer,) = ask(app_with(), ("GET", path))
    assert answer.status_code == 503
    assert (answer.json()["status"], answer.json()["reason"]) == ("loading", "The engine is loading.")
    assert answer.json()["error"]["code"] == "engine_loading"
    assert answer.headers["retry-after"] == "5"


def test_an_engine_that_has_ended_is_named_with_its_reason():
    (answer,) = ask(app_with(engines=engine(is_alive=False, failure="killed by SIGKILL")), ("GET", "/health"))
    assert (answer.status_code, answer.json()["status"], answer.json()["reason"]) == (503, "ended", "killed by SIGKILL")


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_an_engine_without_progress_is_not_well_and_the_answer_says_where_it_is_stuck(path):
    stalled = "stalled: step 8123 for 31 s in backend.forward"
    (answer,) = ask(app_with(engines=engine(is_alive=True, stalled=stalled)), ("GET", path))
    assert (answer.status_code, answer.json()["status"]) == (503, "stalled")
    assert answer.json()["reason"] == f"The engine is {stalled}."
    assert answer.headers["retry-after"] == "5"


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_a_server_that_shuts_down_is_not_well_though_its_engine_is(path):
    gate = DrainGuard()
    app = app_with(engines=engine(is_alive=True), more={"gate": gate})
    gate.close()
    (answer,) = ask(app, ("GET", path))
    assert (answer.status_code, answer.json()["status"]) == (503, "draining")


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
