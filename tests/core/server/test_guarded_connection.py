from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import types
from collections.abc import Iterator

import pytest
import uvicorn

from trencadis.server import guarded_connection
from trencadis.server.guarded_connection import MAX_HEAD_BYTES, connection_class
from trencadis.server.lifecycle import event_loop_factory
from trencadis.server.sockets import listen

TIMEOUT_S = 20
HEAD = b"GET / HTTP/1.1\r\nHost: t\r\n"


class Endless:
    """An application that streams until its client is gone, and remembers how that ended."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.num_sent = 0

    async def __call__(self, scope, receive, send):
        if scope["path"] != "/endless":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})
            return
        await receive()
        gone = asyncio.create_task(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            self.num_sent += 65536
            await asyncio.sleep(0)
        assert gone.result()["type"] == "http.disconnect"
        self.ended.set()


@contextlib.contextmanager
def serving(app, *, loop_factory=None, **timeouts) -> Iterator[int]:
    """Run an application on guarded connections; yields the port."""
    timeouts = {"head_timeout_s": TIMEOUT_S, "send_timeout_s": TIMEOUT_S, **timeouts}
    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(
        app, http=connection_class(**timeouts), ws="none", lifespan="off", log_config=None, access_log=False
    )
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)

    def main():
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(server.serve(sockets=[listener]))

    port = listener.getsockname()[1]
    thread = threading.Thread(target=main)
    thread.start()
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join(TIMEOUT_S)


@pytest.fixture(params=["asyncio", "fastest"])
def loops(request):
    return event_loop_factory() if request.param == "fastest" else None


def connect(port, *, receive_buffer=0):
    client = socket.socket()
    client.settimeout(TIMEOUT_S)
    if receive_buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect(("127.0.0.1", port))
    return client


def everything(client):
    """Return what comes until the connection ends."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65536):
            data += part
    return data


@pytest.mark.parametrize("start", [b"", b"G", HEAD])
def test_a_head_that_does_not_come_to_its_end_closes_the_connection(start, loops):
    with serving(Endless(), loop_factory=loops, head_timeout_s=0.1) as port, connect(port) as client:
        client.sendall(start)
        assert everything(client) == b""


def test_a_head_on_a_used_connection_has_the_same_time():
    with serving(Endless(), head_timeout_s=0.1) as port, connect(port) as client:
        client.sendall(HEAD + b"\r\n")
        answer = b""
        while not answer.endswith(b"\r\n\r\nok"):
            answer += client.recv(1000)
        client.sendall(b"GET")
        assert everything(client) == b""


def test_a_request_that_came_in_time_may_take_longer_than_its_head(loops):
    app = Endless()
    with serving(app, loop_factory=loops, head_timeout_s=0.05) as port, connect(port) as client:
        client.sendall(HEAD.replace(b"/ ", b"/endless ") + b"\r\n")
        num_bytes = 0
        while num_bytes < 5_000_000:  # for longer than the head's time
            num_bytes += len(client.recv(65536))
    assert app.ended.wait(TIMEOUT_S)


def test_a_head_without_an_end_is_refused_at_its_limit():
    with serving(Endless()) as port, connect(port) as client:
        client.sendall(HEAD)
        with contextlib.suppress(ConnectionError):
            for _ in range(MAX_HEAD_BYTES // 1000 + 10):
                client.sendall(b"x-a: " + b"y" * 993 + b"\r\n")
        answer = everything(client)
    if answer:  # the client may still be sending when the connection closes, and lose the answer
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 ")
        assert "65536 bytes" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    "nonsense", [b"\x16\x03\x01\x02\x00", b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n"]
)
def test_what_is_no_http_is_answered_in_openais_shape(nonsense, loops):
    with serving(Endless(), loop_factory=loops) as port, connect(port) as client:
        client.sendall(nonsense)
        head, _, body = everything(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"x-request-id: req_" in head
    assert json.loads(body)["error"]["code"] == "invalid_http"


def test_a_client_that_takes_nothing_loses_its_connection_and_its_request(loops):
    app = Endless()
    with serving(app, loop_factory=loops, send_timeout_s=0.1) as port, connect(port, receive_buffer=4096) as client:
        client.sendall(HEAD.replace(b"/ ", b"/endless ") + b"\r\n")
        assert app.ended.wait(TIMEOUT_S)
        # What the kernel holds for a client is bounded; nothing more was made.
        assert app.num_sent < 20_000_000


def test_a_slow_client_is_not_cut_off():
    app = Endless()
    with serving(app, send_timeout_s=0.2) as port, connect(port, receive_buffer=4096) as client:
        client.sendall(HEAD.replace(b"/ ", b"/endless ") + b"\r\n")
        num_bytes = 0
        while num_bytes < 3_000_000:
            num_bytes += len(client.recv(2048))
        assert not app.ended.is_set()
    assert app.ended.wait(TIMEOUT_S)


def test_the_kernel_is_asked_to_watch_the_clients_machine():
    with socket.socket() as one:
        transport = types.SimpleNamespace(get_extra_info={"socket": one}.get)
        guarded_connection._watch_peer(transport)
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
