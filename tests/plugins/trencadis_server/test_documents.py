"""``/`` and ``/docs``: what is served, in words for people and programs, without a file from elsewhere."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

import trencadis
from support.server.server_doubles import app_with, ask, assert_error, make_context
from trencadis_server.app import make_app

JSON = {"headers": {"accept": "application/json"}}


class Loads(HTMLParser):
    """Addresses that a page loads, and scripts that it has within."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.inline = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag in ("script", "img", "iframe") or (tag == "link"):
            self.addresses.append(found.get("src") or found.get("href") or "")
        self.inline += tag == "script" and "src" not in found
        self.inline += sum(name.startswith("on") for name in found)


def test_the_first_page_names_version_models_and_every_documented_route():
    app = make_app(make_context())
    (answer,) = ask(app, ("GET", "/", JSON))
    index = answer.json()
    assert (index["name"], index["version"], index["models"]) == ("trencadis", trencadis.__version__, ["fake"])
    served = {
        (method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods if path != "/"
    }
    assert {(one["method"], one["path"]) for one in index["routes"]} == served
    assert all(one["summary"] for one in index["routes"])
    for path in (index["docs"], index["openapi"]):
        assert ask(app, ("GET", path))[0].status_code == 200


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", "text/plain"),
        ("*/*", "text/plain"),
        ("text/html,application/xhtml+xml,*/*;q=0.8", "text/plain"),
        ("application/json", "application/json"),
        ("application/json, text/plain, */*", "text/plain"),
        ("text/plain;q=0.5, application/json;q=0.9", "application/json"),
        ("application/json;q=none", "text/plain"),
        ("application/json;q=0", "text/plain"),
    ],
)
def test_the_first_page_is_text_for_people_and_json_for_who_asks_for_it(accept, kind):
    (answer,) = ask(app_with(), ("GET", "/", {"headers": {"accept": accept}}))
    assert answer.headers["content-type"].partition(";")[0] == kind


def test_the_text_fits_a_terminal():
    (answer,) = ask(make_app(make_context()), ("GET", "/"))
    lines = answer.text.splitlines()
    assert lines[0] == f"Trencadís {trencadis.__version__}: fake"
    assert any(line.split()[:2] == ["POST", "/v1/chat/completions"] for line in lines)
    assert max(map(len, lines)) <= 80


def test_where_keys_are_needed_the_pages_need_none_and_name_no_model():
    app = make_app(make_context(api_keys=("secret",)))
    index, text, page, document, models = ask(
        app, ("GET", "/", JSON), ("GET", "/"), ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/v1/models")
    )
    assert [one.status_code for one in (index, text, page, document)] == [200] * 4
    assert index.json()["models"] is None
    assert "fake" not in index.text + text.text + page.text + document.text
    assert_error(models, 401, code="invalid_api_key")


def test_the_page_loads_its_files_from_this_server_alone():
    app = app_with(api_keys=("secret",))
    (page,) = ask(app, ("GET", "/docs"))
    loads = Loads(page.text)
    assert (len(loads.addresses), loads.inline) == (4, 0)
    answers = ask(app, *(("GET", f"/{address}") for address in loads.addresses))
    assert [answer.status_code for answer in answers] == [200] * 4
    assert all(re.fullmatch(r"docs/[a-z.-]+", address) for address in loads.addresses)
    kinds = dict(zip(loads.addresses, (answer.headers["content-type"] for answer in answers), strict=True))
    assert kinds["docs/swagger-ui-bundle.js"].startswith("text/javascript")
    assert kinds["docs/swagger-ui.css"].startswith("text/css")
    assert "SwaggerUIBundle" in answers[loads.addresses.index("docs/swagger-ui-bundle.js")].text
    start = answers[loads.addresses.index("docs/start.js")].text
    assert "://" not in start
    assert "validatorUrl: null" in start


def test_the_browser_is_told_to_run_and_load_nothing_else():
    for answer in ask(app_with(), ("GET", "/docs"), ("GET", "/docs/start.js"), ("GET", "/docs/swagger-ui.css")):
        policy = answer.headers["content-security-policy"]
        rules: dict[str, Any] = {one.split()[0]: one.split()[1:] for one in policy.split(";")}
        assert rules["default-src"] == ["'none'"]
        assert rules["script-src"] == rules["connect-src"] == ["'self'"]
        assert not re.search(r"https?:|\*|unsafe-eval", policy)
        assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path", ["/docs/", "/docs/redoc.standalone.js", "/docs/..%2f__init__.py", "/docs/%2e%2e/core.py"]
)
def test_no_other_file_of_the_package_can_be_read(path):
    assert_error(ask(app_with(), ("GET", path))[0], 404, code="unknown_url")


def test_the_document_has_both_forms_of_the_first_page():
    content = json.loads(json.dumps(app_with().openapi()))["paths"]["/"]["get"]["responses"]["200"]["content"]
    assert set(content) == {"application/json", "text/plain"}
