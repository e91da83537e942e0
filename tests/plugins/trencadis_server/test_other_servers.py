"""Routes of other servers are answered 404 with what there is here instead."""

from __future__ import annotations

import re

import pytest
from fastapi.routing import APIRoute
from starlette.routing import Match

from support.server.server_doubles import app_with, ask, assert_error, make_context
from trencadis_server.app import endpoint_routers, make_app
from trencadis_server.routes.other_servers import OTHER_ROUTES, instead_of

PATHS = [path for entry in OTHER_ROUTES for path in entry.paths]


@pytest.fixture(scope="module")
def served():
    app = make_app(make_context())
    return {(method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods}


@pytest.mark.parametrize("path", ["/generate", "/v1/messages", "/v1/responses", "/api/chat", "/completion", "/info"])
def test_a_route_of_another_server_says_whose_it_is_and_what_to_use(path):
    app = make_app(make_context())
    for method in ("GET", "POST"):
        message = assert_error(ask(app, (method, path))[0], 404, code="unknown_url")
        entry = instead_of(path)
        assert message.startswith(f"There is no {path} on this server: it is a route of {entry.servers}. ")
        assert message.endswith(entry.instead)


def test_an_unknown_route_says_where_the_routes_are_listed():
    message = assert_error(ask(make_app(make_context()), ("GET", "/zzz"))[0], 404, code="unknown_url")
    assert message == "There is no /zzz on this server. GET / lists the routes."


def test_a_path_below_a_known_one_and_one_with_a_slash_at_its_end_are_known_too():
    assert instead_of("/v1/responses/resp_1") is instead_of("/v1/responses")
    assert instead_of("/api/chat/") is instead_of("/api/chat")
    assert instead_of("/api/chatter") is None
    assert "/tokenize" in instead_of("/v1/messages/count_tokens").instead
    assert "/tokenize" not in instead_of("/v1/messages").instead


def test_no_route_in_the_table_is_served_here():
    routes = [route for router in endpoint_routers() for route in router.routes if isinstance(route, APIRoute)]
    assert len(routes) > 5
    for path in PATHS:
        for method in ("GET", "POST"):
            scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
            assert all(route.matches(scope)[0] is Match.NONE for route in routes), path
    (answer,) = ask(app_with(), ("GET", "/version"))
    assert answer.status_code == 404, "a router that is left out here serves nothing"


def test_every_path_in_the_table_is_answered_by_its_own_entry():
    assert len(PATHS) == len(set(PATHS))
    for entry in OTHER_ROUTES:
        for path in entry.paths:
            assert instead_of(path) is entry, path


def test_every_route_that_the_table_recommends_is_served(served):
    recommended = {
        (method, path)
        for entry in OTHER_ROUTES
        for method, path in re.findall(r"\b(GET|POST) (/[\w/]*\w)", entry.instead)
    }
    assert len(recommended) > 6
    assert recommended <= served | {("GET", "/admin/plugins")}
    for entry in OTHER_ROUTES:
        assert entry.instead.endswith("."), entry
