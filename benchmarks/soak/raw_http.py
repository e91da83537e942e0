"""Raw HTTP attacks: bytes on a socket that no HTTP client would send, or would not send this way."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self

from bad_requests import GOOD, dump

__all__ = ["RAW_CASES", "RawResult", "run_raw"]

_BODY = dump(GOOD["/v1/completions"])
_STREAM = dump({**GOOD["/v1/completions"], "max_tokens": 300, "stream": True, "ignore_eos": True})


@dataclass(frozen=True)
class RawResult:
    """How a raw case ended.

    Attributes:
        outcome: ``200`` and its like: the first status that came; ``closed``: nothing came before the end; ``open``: the server
            neither answered nor closed within the case's patience; ``left``: the client left first, as the case wants it.
        num_sent_bytes: Bytes the server took.
        has_retry_after: The first answer says when to try again.
    """

    outcome: str
    num_sent_bytes: int
    has_retry_after: bool = False


class Connection:
    """One connection with bounds: what is sent, and for how long anything is waited for."""

    def __init__(
        self, port: int, opening: asyncio.Lock, *, most_bytes: int = 8 * 2**20, patience_s: float = 8.0
    ) -> None:
        self._port = port
        self._opening = opening
        self._most_bytes = most_bytes
        self._patience_s = patience_s
        self.num_sent_bytes = 0
        self.data = b""
        self.has_ended = False

    async def __aenter__(self) -> Self:
        async with self._opening:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**20)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def send(self, data: bytes) -> bool:
        """Send; returns whether the server still takes anything."""
        if self.num_sent_bytes > self._most_bytes or self.writer.is_closing():
            return False
        try:
            self.writer.write(data)
            async with asyncio.timeout(self._patience_s):
                await self.writer.drain()
        except (OSError, TimeoutError):
            return False
        self.num_sent_bytes += len(data)
        return True

    async def read(self, patience_s: float | None = None) -> bytes:
        """Read what comes until the end, or until patience does."""
        try:
            async with asyncio.timeout(self._patience_s if patience_s is None else patience_s):
                while part := await self.reader.read(65536):
                    self.data = (self.data + part)[: 2**20]
                self.has_ended = True
        except TimeoutError:
            pass
        except OSError:
            self.has_ended = True
        return self.data

    def result(self) -> RawResult:
        """Return how it ended."""
        data = self.data
        while data.startswith(b"HTTP/1.1 100"):
            data = data.partition(b"\r\n\r\n")[2]
        status = data[9:12].decode("latin1") if data.startswith(b"HTTP/") else ""
        has_retry_after = b"\r\nretry-after:" in data.partition(b"\r\n\r\n")[0].lower()
        return RawResult(status or ("closed" if self.has_ended else "open"), self.num_sent_bytes, has_retry_after)

    def reset(self) -> None:
        """Leave rudely."""
        found = self.writer.get_extra_info("socket")
        if found is not None and found.fileno() >= 0:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


def head(*lines: str, path: str = "/v1/completions", method: str = "POST") -> bytes:
    """Return the head of a request."""
    return "\r\n".join(
        [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json", *lines, "", ""]
    ).encode("latin1")


def _chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%s\r\n%s\r\n" % (len(data), extension, data)


_CLOSE = "connection: close"
_CHUNKED = "transfer-encoding: chunked"
_LENGTH = f"content-length: {len(_BODY)}"

# At once: bytes that are sent in one go, after which the server must answer or close.
_BYTES: dict[str, bytes] = {
    "no http": b"hello\r\n\r\n",
    "tls": bytes.fromhex("16030100c8010000c40303") + b"\x00" * 200,
    "http 0.9": b"GET /\r\n",
    "http 2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http 9.9": b"GET /health HTTP/9.9\r\nhost: t\r\n\r\n",
    "http 1.0": b"GET /health HTTP/1.0\r\n\r\n",
    "nul bytes": b"\x00" * 5000,
    "head of 120 KB": head("x: " + "a" * 120_000, "content-length: 0", _CLOSE),
    "head of 2000 headers": head(*[f"x{i}: y" for i in range(2000)], _LENGTH, _CLOSE) + _BODY,
    "url of 200 KB": head("content-length: 0", path="/" + "a" * 200_000),
    "no host": b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\nconnection: close\r\n\r\n",
    "folded header": b"GET /health HTTP/1.1\r\nhost: a\r\nx: 1\r\n 2\r\nconnection: close\r\n\r\n",
    "space before colon": b"GET /health HTTP/1.1\r\nhost : a\r\nconnection: close\r\n\r\n",
    "bare line feeds": b"GET /health HTTP/1.1\nhost: a\nconnection: close\n\n",
    "bare carriage return": b"GET /health HTTP/1.1\r\nhost: a\rx: b\r\nconnection: close\r\n\r\n",
    "nul in header": b"GET /health HTTP/1.1\r\nhost: a\r\nx: \x00\r\nconnection: close\r\n\r\n",
    "lengths differ": head(_LENGTH, "content-length: 5", _CLOSE) + _BODY,
    "lengths in a list": head(f"{_LENGTH}, 5", _CLOSE) + _BODY,
    "length negative": head("content-length: -1", _CLOSE) + _BODY,
    "length with a sign": head(f"content-length: +{len(_BODY)}", _CLOSE) + _BODY,
    "length no number": head("content-length: ten", _CLOSE) + _BODY,
    "length of 30 digits": head("content-length: " + "9" * 30, _CLOSE) + _BODY,
    "length in hexadecimal": head("content-length: 0x10", _CLOSE) + _BODY,
    "length in other digits": head("content-length: \xb2", _CLOSE) + _BODY,
    "length too short": head("content-length: 5", _CLOSE) + _BODY,
    "length and chunked": head(_LENGTH, _CHUNKED, _CLOSE) + _chunk(_BODY) + b"0\r\n\r\n",
    "chunked twice": head(_CHUNKED, _CHUNKED, _CLOSE) + _chunk(_BODY) + b"0\r\n\r\n",
    "chunked and gzip": head("transfer-encoding: gzip, chunked", _CLOSE) + _chunk(_BODY) + b"0\r\n\r\n",
    "chunked not last": head("transfer-encoding: chunked, gzip", _CLOSE) + _chunk(_BODY) + b"0\r\n\r\n",
    "chunk size no number": head(_CHUNKED, _CLOSE) + b"zz\r\nabc\r\n0\r\n\r\n",
    "chunk size negative": head(_CHUNKED, _CLOSE) + b"-5\r\nabcde\r\n0\r\n\r\n",
    "chunk size of 30 digits": head(_CHUNKED, _CLOSE) + b"f" * 30 + b"\r\nabc\r\n0\r\n\r\n",
    "chunk longer than said": head(_CHUNKED, _CLOSE) + b"3\r\nabcdef\r\n0\r\n\r\n",
    "trailers": head(_CHUNKED, _CLOSE) + _chunk(_BODY) + b"0\r\nx: y\r\nz: 5\r\n\r\n",
    "extensions": head(_CHUNKED, _CLOSE) + _chunk(_BODY, b";a=b;c") + b"0\r\n\r\n",
    "get with a body": head(_LENGTH, _CLOSE, path="/health", method="GET") + _BODY,
    "upgrade to websocket": head(
        "connection: upgrade", "upgrade: websocket", "sec-websocket-key: x", path="/", method="GET"
    ),
    "connect": b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nhost: 127.0.0.1:22\r\nconnection: close\r\n\r\n",
    "absolute": b"GET http://127.0.0.1:22/ HTTP/1.1\r\nhost: 127.0.0.1:22\r\nconnection: close\r\n\r\n",
    "smuggled": head("content-length: 4", _CHUNKED) + b"0\r\n\r\nGET /admin/plugins HTTP/1.1\r\nhost: a\r\n\r\n",
    "expect": head(_LENGTH, "expect: 100-continue", _CLOSE) + _BODY,
    "expect much": head(f"content-length: {10**9}", "expect: 100-continue"),
    "pipelined good": (head(_LENGTH) + _BODY) * 9 + head(_LENGTH, _CLOSE) + _BODY,
    "pipelined beyond": (head(_LENGTH) + _BODY) * 100,
    "pipelined health": b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n" * 1000,
    "pipelined good and garbage": head(_LENGTH) + _BODY + b"\x00\x01\x02garbage\r\n\r\n",
    "pipelined streams": (head(f"content-length: {len(_STREAM)}") + _STREAM) * 5,
    "header names of bytes": b"GET /health HTTP/1.1\r\nhost: a\r\n\xff\xfe: 1\r\nconnection: close\r\n\r\n",
    "empty header name": b"GET /health HTTP/1.1\r\nhost: a\r\n: 1\r\nconnection: close\r\n\r\n",
    "blank lines first": b"\r\n" * 500 + b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
    "method of 10 KB": b"A" * 10_000 + b" / HTTP/1.1\r\nhost: a\r\n\r\n",
}


async def _endless(connection: Connection, rng: random.Random, start: bytes, part: Callable[[], bytes]) -> None:
    """Send one part after the other until the server has had enough."""
    await connection.send(start)
    while await connection.send(part() * 200):
        if connection.reader.at_eof():
            break
    await connection.read()


async def _trailers(connection: Connection, rng: random.Random) -> None:
    start = head(_CHUNKED) + _chunk(_BODY) + b"0\r\n"
    await _endless(connection, rng, start, lambda: b"x-%d: %s\r\n" % (rng.randrange(10**6), b"y" * 500))


async def _trailers_wrong_key(connection: Connection, rng: random.Random) -> None:
    start = head(_CHUNKED, "authorization: Bearer wrong") + _chunk(_BODY) + b"0\r\n"
    await _endless(connection, rng, start, lambda: b"x: " + b"y" * 500 + b"\r\n")


async def _trailer_line(connection: Connection, rng: random.Random) -> None:
    await _endless(connection, rng, head(_CHUNKED) + b"0\r\nx: ", lambda: b"y" * 500)


async def _extensions(connection: Connection, rng: random.Random) -> None:
    await _endless(connection, rng, head(_CHUNKED) + b"1;", lambda: b"a=b;" * 100)


async def _chunk_extensions(connection: Connection, rng: random.Random) -> None:
    await _endless(connection, rng, head(_CHUNKED), lambda: b"1;%s\r\n \r\n" % (b"a" * 500))


async def _size_zeros(connection: Connection, rng: random.Random) -> None:
    await _endless(connection, rng, head(_CHUNKED), lambda: b"0" * 500)


async def _endless_head(connection: Connection, rng: random.Random) -> None:
    await _endless(connection, rng, b"GET /health HTTP/1.1\r\n", lambda: b"x: " + b"y" * 500 + b"\r\n")


async def _endless_header(connection: Connection, rng: random.Random) -> None:
    await _endless(connection, rng, b"GET /health HTTP/1.1\r\nx: ", lambda: b"y" * 500)


async def _endless_line(connection: Connection, rng: random.Random) -> None:
    await _endless(connection, rng, b"GET /", lambda: b"y" * 500)


async def _small_chunks(connection: Connection, rng: random.Random) -> None:
    await _endless(connection, rng, head(_CHUNKED), lambda: b"1\r\n \r\n" * 100)


async def _blank_lines(connection: Connection, rng: random.Random) -> None:
    await _endless(connection, rng, b"", lambda: b"\r\n" * 250)


async def _too_long(connection: Connection, rng: random.Random) -> None:
    await _endless(connection, rng, head(_LENGTH) + _BODY, lambda: b"z" * 500)


async def _slow_head(connection: Connection, rng: random.Random) -> None:
    for byte in head(_LENGTH)[: rng.choice((10, 40))]:
        if not await connection.send(bytes([byte])):
            break
        await asyncio.sleep(0.1)
    await connection.read(rng.choice((0.1, 8)))


async def _slow_body(connection: Connection, rng: random.Random) -> None:
    await connection.send(head(_LENGTH))
    for byte in _BODY[: rng.choice((10, 40))]:
        if not await connection.send(bytes([byte])):
            break
        await asyncio.sleep(0.1)
    await connection.read(rng.choice((0.1, 8)))


async def _bytewise(connection: Connection, rng: random.Random) -> None:
    """A good request, a byte at a time: slow but right."""
    for byte in head(_LENGTH, _CLOSE) + _BODY:
        await connection.send(bytes([byte]))
    await connection.read(30)


async def _half_closed(connection: Connection, rng: random.Random) -> None:
    """A good request from a client that will say no more: it gets its answer."""
    await connection.send(head(_LENGTH, _CLOSE) + _BODY)
    connection.writer.write_eof()
    await connection.read(30)


async def _half_body(connection: Connection, rng: random.Random) -> None:
    await connection.send(head(_LENGTH) + _BODY[:10])
    connection.writer.write_eof()
    await connection.read()


async def _reset_in_stream(connection: Connection, rng: random.Random) -> None:
    await connection.send(head(f"content-length: {len(_STREAM)}") + _STREAM)
    await connection.read(rng.choice((0, 0.05, 0.5)))
    connection.reset()


async def _reset_in_body(connection: Connection, rng: random.Random) -> None:
    await connection.send(head(_LENGTH) + _BODY[:20])
    connection.reset()


async def _deaf(connection: Connection, rng: random.Random) -> None:
    """A client that takes nothing of its stream for a while."""
    await connection.send(head(f"content-length: {len(_STREAM)}") + _STREAM)
    connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await asyncio.sleep(rng.choice((0.5, 3)))
    connection.reset()


async def _silent(connection: Connection, rng: random.Random) -> None:
    await connection.read(rng.choice((0.2, 8)))


_SCRIPTS: dict[str, Callable[[Connection, random.Random], Awaitable[None]]] = {
    "trailers without end": _trailers,
    "trailers with a wrong key": _trailers_wrong_key,
    "a trailer without end": _trailer_line,
    "an extension without end": _extensions,
    "chunks with long extensions": _chunk_extensions,
    "a chunk size of zeros": _size_zeros,
    "headers without end": _endless_head,
    "a header without end": _endless_header,
    "a request line without end": _endless_line,
    "chunks of one byte without end": _small_chunks,
    "blank lines without end": _blank_lines,
    "more than was announced": _too_long,
    "slow head": _slow_head,
    "slow body": _slow_body,
    "a byte at a time": _bytewise,
    "half closed": _half_closed,
    "half a body": _half_body,
    "reset in a stream": _reset_in_stream,
    "reset in a body": _reset_in_body,
    "deaf": _deaf,
    "silent": _silent,
}

RAW_CASES: tuple[str, ...] = (*_BYTES, *_SCRIPTS)
"""Names of all raw cases."""

MUST_ANSWER = frozenset(
    {"a byte at a time", "half closed", "pipelined good", "trailers", "extensions", "get with a body"}
)
"""Good requests in an unusual form: they are answered 200."""

LEAVES = frozenset({"reset in a stream", "reset in a body", "deaf", "silent", "slow head", "slow body"})
"""The client may leave first."""


async def run_raw(port: int, name: str, rng: random.Random, opening: asyncio.Lock | None = None) -> RawResult:
    """Play one case against a server on loopback; bounded in bytes and time. ``opening`` is held until something can be sent."""
    async with Connection(port, opening or asyncio.Lock()) as connection:
        if name in _BYTES:
            await connection.send(_BYTES[name])
            await connection.read()
        else:
            await _SCRIPTS[name](connection, rng)
        result = connection.result()
        connection.reset()
    return RawResult("left", result.num_sent_bytes) if name in LEAVES and result.outcome == "open" else result
