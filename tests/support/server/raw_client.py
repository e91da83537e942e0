"""A client of one request on a bare socket, which can leave at any moment, politely or not."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from typing import Any, Self

TIMEOUT_S = 20


def post_head(path: str, *headers: str) -> bytes:
    """Return the head of a POST of JSON."""
    lines = [f"POST {path} HTTP/1.1", "host: t", "content-type: application/json", *headers, "", ""]
    return "\r\n".join(lines).encode()


class RawClient:
    """One connection.

    Args:
        port: Of the server.
        receive_buffer: Bytes the kernel keeps for it; 0: as many as it likes.
    """

    def __init__(self, port: int, *, receive_buffer: int = 0) -> None:
        self.socket = socket.socket()
        self.socket.settimeout(TIMEOUT_S)
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.connect(("127.0.0.1", port))
        self.data = b""

    def post(self, path: str, body: Any, *headers: str, num_bytes: int | None = None) -> None:
        """Send a request, or its first bytes."""
        content = json.dumps(body).encode()
        whole = post_head(path, f"content-length: {len(content)}", "connection: close", *headers) + content
        self.socket.sendall(whole[:num_bytes])

    def read(self, num_bytes: int) -> None:
        """Take what comes, up to that many bytes."""
        with contextlib.suppress(ConnectionError):
            self.data += self.socket.recv(num_bytes)

    def read_all(self) -> bytes:
        """Take everything until the server closes; returns the whole answer."""
        with contextlib.suppress(ConnectionError):
            while part := self.socket.recv(65536):
                self.data += part
        return self.data

    def leave(self, *, rudely: bool = False) -> None:
        """Close the connection: with what is left to say, or with a reset."""
        if rudely:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def status_of(answer: bytes) -> int:
    """Return the status of a whole answer."""
    return int(answer.split(b" ", 2)[1])


def body_of(answer: bytes) -> bytes:
    """Return the body of a whole answer, chunks put together."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in head.lower():
        return rest
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body
