from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from trencadis.cli.main import main

SPAN = {
    "first_step": 12,
    "last_step": 480,
    "num_steps": 469,
    "first_s": 0.5,
    "last_s": 9.25,
    "outcome": "waited",
    "reason": "no free blocks",
    "policy": "fcfs",
    "other": "",
    "num_tokens": 0,
    "tokens": None,
    "rank": [7, 7],
    "num_waiting": [9, 11],
    "num_running": [3, 4],
    "budget_left": [100, 2000],
    "blocks_needed": [9, 9],
    "blocks_free": [3, 5],
    "buckets": [],
}
RAN = {
    **SPAN,
    "first_step": 481,
    "last_step": 481,
    "first_s": 9.5,
    "last_s": 9.5,
    "outcome": "prefill",
    "reason": "admitted",
    "tokens": [0, 33],
    "blocks_needed": None,
    "blocks_free": [12, 12],
    "buckets": ["prefill 1x64, 0 blocks"],
}
STORY = {
    "oldest_step": 2,
    "newest_step": 500,
    "requests": [
        {
            "request_id": "cmpl-1-0",
            "state": "finished",
            "finish_reason": "stop",
            "error": "",
            "num_prompt_tokens": 33,
            "num_output_tokens": 4,
            "is_complete": False,
            "spans": [SPAN, RAN],
        }
    ],
}
UNKNOWN = {"error": {"message": "request 'x' is not known.", "type": "", "param": None, "code": "unknown_request"}}


@pytest.fixture
def served() -> Iterator[Callable[..., str]]:
    """Serves one answer for every path on loopback; returns the address, whose last path is ``served.paths[-1]``."""
    servers: list[Any] = []

    def serve(status: int, body: Any) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                serve.paths.append(self.path)  # type: ignore[attr-defined]
                serve.keys.append(self.headers["authorization"])  # type: ignore[attr-defined]
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

            def log_message(self, *_: Any) -> None:
                pass

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    serve.paths, serve.keys = [], []  # type: ignore[attr-defined]
    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def test_spans_are_a_table_that_can_be_read(served: Any, capsys: pytest.CaptureFixture[str]):
    assert main(["explain", "cmpl-1", "--url", served(200, STORY)]) == 0
    out = capsys.readouterr().out
    assert served.paths == ["/admin/explain/cmpl-1"]
    assert "record: steps 2 to 500" in out
    assert "cmpl-1-0: finished, stop; 33 prompt and 4 output tokens" in out
    assert "its first steps are no longer in the record" in out
    heading, waited, ran = [line for line in out.splitlines() if line.startswith(("steps", "12-480", "481"))]
    assert heading.split()[:4] == ["steps", "seconds", "outcome", "why"]
    for part in ("0.500-9.250", "waited", "no free blocks", " 7 ", "needs 9, free 3-5", "3-4", "fcfs"):
        assert part in waited
    for part in ("prefill", "admitted", "0 to 33", "free 12", "prefill 1x64, 0 blocks"):
        assert part in ran


def test_json_is_what_the_server_said(served: Any, capsys: pytest.CaptureFixture[str]):
    assert main(["explain", "a/0?b", "--json", "--url", served(200, STORY)]) == 0
    assert json.loads(capsys.readouterr().out) == STORY
    assert served.paths == ["/admin/explain/a/0%3Fb"]


def test_the_address_is_the_configured_port(served: Any, capsys: pytest.CaptureFixture[str]):
    port = served(200, STORY).rpartition(":")[2]
    assert main(["explain", "a", "--server.admin-port", port]) == 0
    assert (served.paths, served.keys) == (["/admin/explain/a"], [None])


def test_the_key_of_the_administration_is_sent_and_none_of_a_client(served: Any, monkeypatch: pytest.MonkeyPatch):
    url = served(200, STORY)
    monkeypatch.setenv("TRENCADIS_SERVER__API_KEYS", "ann:sk-a,sk-b")
    assert main(["explain", "a", "--url", url]) == 0
    monkeypatch.setenv("TRENCADIS_SERVER__ADMIN_KEY", "x:y")
    assert main(["explain", "a", "--url", url]) == 0
    assert served.keys == [None, "Bearer x:y"]


@pytest.mark.parametrize(
    ("status", "body", "words", "code"),
    [
        (404, UNKNOWN, "request 'x' is not known.", 2),
        (404, {"error": {"message": "no", "code": "unknown_url"}}, "there are no administration pages", 2),
        (503, {"error": {"message": "The engine is loading.", "code": "engine_loading"}}, "The engine is loading.", 69),
        (500, b"oops", "it answered 500", 69),
        (200, b"<html>", "no server answers", 69),
        (200, {"other": 1}, "no administration of Trencad", 69),
    ],
)
def test_what_the_server_refuses_is_said_in_its_words(
    served: Any, capsys: pytest.CaptureFixture[str], status: int, body: Any, words: str, code: int
):
    assert main(["explain", "x", "--url", served(status, body)]) == code
    assert words in capsys.readouterr().err


def test_nobody_there_and_nowhere_to_ask_say_what_to_do(served: Any, capsys: pytest.CaptureFixture[str]):
    assert main(["explain", "x", "--url", "http://127.0.0.1:9"]) == 69
    assert "http://127.0.0.1:9: no server answers" in (error := capsys.readouterr().err)
    assert "Start trencadis serve" in error
    assert main(["explain", "x"]) == 2
    assert "[server] admin_port = 0" in capsys.readouterr().err
    assert main(["explain", "x", "--url", "127.0.0.1:8001"]) == 2
    assert "It reads http://HOST:PORT" in capsys.readouterr().err
