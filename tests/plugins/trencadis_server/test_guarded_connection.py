from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import threading
import types
from collections.abc import Iterator

import pytest
import uvicorn

from support.server.raw_client import RawClient
from trencadis_server.errors import ApiError
from trencadis_server.lifecycle import guarded_connection
from trencadis_server.lifecycle.guarded_connection import MAX_HEAD_BYTES, connection_class
from trencadis_server.lifecycle.lifecycle import event_loop_factory
from trencadis_server.lifecycle.opening import listen
from trencadis_server.middleware.failures import refuse

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


class Collecting:
    """An application that collects the body, unless it refuses the request first; answers with the headers it sees afterwards."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.scopes = []
        self.num_unanswered = 0

    async def __call__(self, scope, receive, send):
        self.scopes.append(scope)
        if self.refuses:
            await refuse(scope, receive, send, ApiError(401, "The key is not known."))
            return
        self.num_unanswered += 1
        body, more_body = b"", True
        while more_body:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            more_body = message["more_body"]
        answer = json.dumps([len(body), [name.decode() for name, _ in scope["headers"]]]).encode()
        length = (b"content-length", str(len(answer)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": answer})
        self.num_unanswered -= 1


class Waiting:
    """An application that answers when it is told to; ``left`` is set when the client went before."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.entered, self.left = threading.Event(), threading.Event()

    def answer(self) -> None:
        self.loop.call_soon_threadsafe(self.go.set)

    async def __call__(self, scope, receive, send):
        self.num_calls += 1
        self.loop, self.go = asyncio.get_running_loop(), asyncio.Event()
        if (await receive())["type"] == "http.disconnect":
            self.left.set()
            return
        self.entered.set()
        gone, go = asyncio.ensure_future(receive()), asyncio.ensure_future(self.go.wait())
        await asyncio.wait({gone, go}, return_when=asyncio.FIRST_COMPLETED)
        go.cancel()
        if gone.done():
            self.left.set()
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})
        gone.cancel()


def pour(client, first, piece, *, max_bytes=2**26):
    """Send ``first``, then ``piece`` again and again until the server ends the connection; returns how much it took, and its answer."""
    num_bytes, answer, data = 0, b"", first
    with contextlib.suppress(ConnectionError):
        while num_bytes < max_bytes:
            readable, writable, _ = select.select([client], [client], [], TIMEOUT_S)
            if readable:
                part = client.recv(65536)
                answer += part
                if not part:
                    break
            if writable:
                num_sent = client.send(data)
                num_bytes, data = num_bytes + num_sent, data[num_sent:] or piece
    return num_bytes, answer


@pytest.fixture(params=["asyncio", "fastest"])
def loops(request):
    return event_loop_factory() if request.param == "fastest" else None


@pytest.mark.parametrize("start", [b"G", HEAD])
def test_a_head_that_does_not_come_to_its_end_is_refused(start, loops):
    with serving(Endless(), loop_factory=loops, head_timeout_s=0.1) as port, RawClient(port) as client:
        client.socket.sendall(start)
        answer = client.read_all()
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"did not arrive within 0.1 s" in answer


def test_a_connection_without_a_request_is_closed_and_a_used_one_has_as_much_time_for_the_next_head(loops):
    with serving(Endless(), loop_factory=loops, head_timeout_s=0.1) as port:
        with RawClient(port) as client:
            assert client.read_all() == b""
        with RawClient(port) as client:
            client.socket.sendall(HEAD + b"\r\n")
            while not client.data.endswith(b"\r\n\r\nok"):
                client.read(1000)
            client.socket.sendall(b"GET")
            assert b"HTTP/1.1 408 " in client.read_all()


def test_a_head_that_comes_whole_in_one_read_has_the_same_limit(loops):
    with serving(Endless(), loop_factory=loops) as port:
        for num_bytes, status in ((MAX_HEAD_BYTES, b"200"), (MAX_HEAD_BYTES + 1, b"431"), (120_000, b"431")):
            with RawClient(port) as client:
                start = HEAD + b"Connection: close\r\nx-long: "
                client.socket.sendall(start + b"y" * (num_bytes - len(start) - 4) + b"\r\n\r\n")
                assert client.read_all().split()[1] == status, num_bytes


CHUNKED = b"POST /body HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"
MAX_TAKEN_BYTES = 2**24
"""Limits of the server, and what the kernel buffers on both sides."""


@pytest.mark.parametrize("refuses", [False, True], ids=["taken", "refused"])
@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (b"0\r\n", b"x-trailer: " + b"y" * 2**15 + b"\r\n"),
        (b"0\r\nx-trailer: ", b"y" * 2**16),
        (b"", b"1;" + b"e" * 2**15 + b"\r\nx\r\n"),
        (b"1;", b"e" * 2**16),
        (b"", b"1\r\nx\r\n" * 2**13),
    ],
    ids=["trailers", "one trailer", "extensions", "one extension", "chunks of one byte"],
)
def test_what_surrounds_a_body_is_bounded(first, piece, refuses, loops):
    app = Collecting(refuses=refuses)
    with serving(app, loop_factory=loops) as port, RawClient(port) as client:
        num_bytes, answer = pour(client.socket, CHUNKED + first, piece)
    assert num_bytes < MAX_TAKEN_BYTES
    if answer:
        assert answer.split()[1] in ({b"401", b"413"} if refuses else {b"413"})
    assert sum(len(value) for _, value in app.scopes[0]["headers"]) < 100


def test_what_surrounds_a_body_may_be_as_long_as_the_body(loops):
    chunks = b"40;" + b"e" * 58 + b"\r\n" + b"x" * 64 + b"\r\n"
    num_chunks = 50_000
    with serving(Collecting(), loop_factory=loops) as port, RawClient(port) as client:
        client.socket.sendall(
            CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + chunks * num_chunks + b"0\r\n\r\n"
        )
        assert json.loads(client.read_all().partition(b"\r\n\r\n")[2])[0] == 64 * num_chunks


def test_trailers_are_no_headers(loops):
    with serving(Collecting(), loop_factory=loops) as port, RawClient(port) as client:
        client.socket.sendall(CHUNKED.replace(b"Host: t", b"Host: t\r\nConnection: close"))
        client.socket.sendall(b"2\r\nab\r\n0\r\nauthorization: Bearer k\r\n\r\n")
        size, names = json.loads(client.read_all().partition(b"\r\n\r\n")[2])
    assert (size, names) == (2, ["host", "connection", "transfer-encoding"])


def test_one_connection_serves_many_requests_whose_heads_together_exceed_the_limit(loops):
    with serving(Endless(), loop_factory=loops) as port, RawClient(port) as client:
        for _ in range(20):
            client.socket.sendall(HEAD + b"x-long: " + b"y" * 30_000 + b"\r\n\r\n")
            answer = b""
            while not answer.endswith(b"\r\n\r\nok"):
                answer += client.socket.recv(1000)
            assert answer.split()[1] == b"200"


def test_a_client_cannot_send_requests_ahead_without_end(loops):
    app = Waiting()
    with serving(app, loop_factory=loops) as port, RawClient(port) as client:
        assert pour(client.socket, HEAD + b"\r\n", (HEAD + b"\r\n") * 500)[0] < MAX_TAKEN_BYTES
        assert app.left.wait(TIMEOUT_S)
    assert app.num_calls == 1


def test_requests_sent_ahead_are_answered_in_order(loops):
    with serving(Endless(), loop_factory=loops) as port, RawClient(port) as client:
        client.socket.sendall((HEAD + b"\r\n") * 9 + HEAD + b"Connection: close\r\n\r\n")
        assert client.read_all().count(b"\r\n\r\nok") == 10


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_a_client_that_has_shut_its_sending_side_is_answered(loops, version):
    app = Waiting()
    with serving(app, loop_factory=loops) as port, RawClient(port) as client:
        client.socket.sendall(HEAD.replace(b"1.1", version) + b"\r\n")
        client.socket.shutdown(socket.SHUT_WR)
        assert app.entered.wait(TIMEOUT_S)
        assert not app.left.wait(0.5)  # several looks at whether the client is there
        app.answer()
        answer = client.read_all().removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.endswith(b"\r\n\r\nok")


@pytest.mark.parametrize("pipelined", [1, 3])
def test_a_client_that_has_gone_ends_its_request(loops, pipelined):
    app = Waiting()
    with serving(app, loop_factory=loops) as port:
        with RawClient(port) as client:
            client.socket.sendall((HEAD + b"\r\n") * pipelined)
            assert app.entered.wait(TIMEOUT_S)
        assert app.left.wait(TIMEOUT_S)
    assert app.num_calls == 1


def test_a_request_that_is_cut_off_in_its_middle_ends(loops):
    app = Collecting()
    with serving(app, loop_factory=loops) as port:
        for part in (HEAD, CHUNKED + b"5\r\nabc"):
            with RawClient(port) as client:
                client.socket.sendall(part)
                client.socket.shutdown(socket.SHUT_WR)
                assert client.read_all() == b""


@pytest.mark.parametrize(
    "nonsense", [b"\x16\x03\x01\x02\x00", b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n"]
)
def test_what_is_no_http_is_answered_in_openais_shape_and_a_line_of_the_access_log(nonsense, loops, caplog):
    caplog.set_level("INFO", "trencadis.access")
    with serving(Endless(), loop_factory=loops) as port, RawClient(port) as client:
        client.socket.sendall(nonsense)
        head, _, body = client.read_all().partition(b"\r\n\r\n")
    assert [record.getMessage()[:27] for record in caplog.records if record.name == "trencadis.access"] == [
        "A connection was refused: 4"
    ]
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"x-request-id: req_" in head
    assert json.loads(body)["error"]["code"] == "invalid_http"


def test_a_client_that_takes_nothing_loses_its_connection_and_its_request(loops):
    app = Endless()
    with serving(app, loop_factory=loops, send_timeout_s=0.1) as port, RawClient(port, receive_buffer=4096) as client:
        client.socket.sendall(HEAD.replace(b"/ ", b"/endless ") + b"\r\n")
        assert app.ended.wait(TIMEOUT_S)
        # What the kernel holds for a client is bounded; nothing more was made.
        assert app.num_sent < 20_000_000


def test_a_slow_client_is_not_cut_off_however_short_the_time_for_its_head():
    app = Endless()
    with serving(app, head_timeout_s=0.05, send_timeout_s=2.0) as port, RawClient(port, receive_buffer=4096) as client:
        client.socket.sendall(HEAD.replace(b"/ ", b"/endless ") + b"\r\n")
        num_bytes = 0
        while num_bytes < 3_000_000:
            num_bytes += len(client.socket.recv(2048))
        assert not app.ended.is_set()
    assert app.ended.wait(TIMEOUT_S)


def test_the_kernel_is_asked_to_watch_the_clients_machine():
    with socket.socket() as one:
        transport = types.SimpleNamespace(get_extra_info={"socket": one}.get)
        guarded_connection._watch_peer(transport)
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
