"""RESP2, the protocol of Redis and Valkey, as far as a store of blocks needs it; payloads are not copied.

The module handles bytes only; its users send and receive them. Replies are never nested: status, error, integer or bulk
string.

    command ─▶ *2 CRLF $3 CRLF GET CRLF $4 CRLF key1 CRLF
    reply   ◀─ +OK CRLF | -ERR text CRLF | :7 CRLF | $-1 CRLF | $5 CRLF 5 bytes CRLF

Source: https://redis.io/docs/latest/develop/reference/protocol-spec/, section "RESP versions", RESP2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

__all__ = ["ProtocolError", "ReplyReader", "ServerError", "command", "set_command"]

_LINE_BYTES = 4096
_SPILL_BYTES = 64
"""Bytes read beyond a payload in the same call: its end and the length of the next one; few, as the rest must be copied."""
_MAX_BULK_BYTES = 512 * 2**20
"""``proto-max-bulk-len`` of a server with default settings; a longer announcement is taken for damage."""


class ProtocolError(Exception):
    """Received bytes are not RESP2: they are damaged, or the server is not Redis."""


class ServerError(Exception):
    """The server answered with an error.

    Args:
        text: Error text of the server, such as ``OOM command not allowed when used memory > 'maxmemory'.``

    Attributes:
        code: First word of the text.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = text.partition(" ")[0]


def command(*words: bytes) -> bytes:
    """Return a command. Pure.

    Args:
        words: Name and arguments of the command.
    """
    parts = [b"*%d\r\n" % len(words)]
    parts += [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
    return b"".join(parts)


def set_command(key: bytes, pieces: Sequence[memoryview], *, ttl_s: int = 0) -> Iterator[bytes | memoryview]:
    """Yield ``SET key value`` without copying the value's pieces. Pure.

    Args:
        key: Key of the value.
        pieces: Contiguous buffers of the value, in order.
        ttl_s: Lifetime of the value on the server, seconds; 0: unlimited.
    """
    num_bytes = sum(piece.nbytes for piece in pieces)
    yield b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (5 if ttl_s else 3, len(key), key, num_bytes)
    for piece in pieces:
        yield piece if piece.ndim == piece.itemsize == 1 else piece.cast("B")
    expiry = b"%d" % ttl_s
    yield b"\r\n$2\r\nEX\r\n$%d\r\n%b\r\n" % (len(expiry), expiry) if ttl_s else b"\r\n"


class ReplyReader:
    """Parses replies, however they were split; payloads are received directly into their destination.

    Args:
        receive: Fills buffers one after the other with what came, and returns how many bytes; it waits for at least one,
            and returns 0 when the other side has ended the connection.
    """

    def __init__(self, receive: Callable[[Sequence[memoryview]], int]) -> None:
        self._receive = receive
        self._buffer = bytearray(_LINE_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0

    @property
    def num_buffered(self) -> int:
        """Received bytes that were not read; 0 between calls if the server keeps to the protocol."""
        return self._end - self._start

    def read_status(self) -> str:
        """Return a status, such as ``OK``.

        Raises:
            ServerError: An error came instead.
            ProtocolError: Something else came.
            ConnectionError: The other side ended the connection.
        """
        return self._expect(b"+").decode("utf-8", "replace")

    def read_integer(self) -> int:
        """Return an integer.

        Raises:
            ServerError: An error came instead.
            ProtocolError: Something else came.
            ConnectionError: The other side ended the connection.
        """
        return _number(self._expect(b":"))

    def read_bulk_into(self, target: memoryview) -> int:
        """Read a bulk string into ``target``, from its beginning.

        Returns:
            Size of the string, bytes; -1 if there is none, or if it is longer than ``target``: then nothing is written.

        Raises:
            ServerError: An error came instead.
            ProtocolError: Something else came.
            ConnectionError: The other side ended the connection.
        """
        num_bytes = _number(self._expect(b"$"))
        if num_bytes == -1:
            return -1
        if not 0 <= num_bytes <= _MAX_BULK_BYTES:
            raise ProtocolError(f"a value of {num_bytes} bytes was announced")
        fits = num_bytes <= len(target)
        if fits:
            self._read_payload(target[:num_bytes])
        else:
            self._skip(num_bytes)
        if self._take(2) != b"\r\n":
            raise ProtocolError("a value is longer than was announced")
        return num_bytes if fits else -1

    def _expect(self, kind: bytes) -> bytes:
        """Return the rest of a line that begins with ``kind``."""
        line = self._line()
        if line[:1] == b"-":
            raise ServerError(line[1:].decode("utf-8", "replace"))
        if line[:1] != kind:
            raise ProtocolError(f"a reply begins with {line[:20]!r} where {kind!r} belongs")
        return line[1:]

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            if self.num_buffered == _LINE_BYTES:
                raise ProtocolError(f"a line is longer than {_LINE_BYTES} bytes")
            self._fill()
        line = bytes(self._view[self._start : end])
        self._start = end + 2
        return line

    def _take(self, num_bytes: int) -> bytes:
        while self.num_buffered < num_bytes:
            self._fill()
        taken = bytes(self._view[self._start : self._start + num_bytes])
        self._start += num_bytes
        return taken

    def _fill(self) -> None:
        """Receive more after what is buffered, which moves to the front."""
        rest = self.num_buffered
        self._view[:rest] = bytes(self._view[self._start : self._end])
        self._start, self._end = 0, rest
        self._end += self._some([self._view[rest:]])

    def _read_payload(self, target: memoryview) -> None:
        filled = min(self.num_buffered, len(target))
        target[:filled] = self._view[self._start : self._start + filled]
        self._start += filled
        while filled < len(target):
            self._start = self._end = 0
            filled += self._some([target[filled:], self._view[:_SPILL_BYTES]])
        self._end += filled - len(target)

    def _skip(self, num_bytes: int) -> None:
        scratch = memoryview(bytearray(min(num_bytes, 2**16)))
        while num_bytes:
            part = scratch[:num_bytes]
            self._read_payload(part)
            num_bytes -= len(part)

    def _some(self, buffers: Sequence[memoryview]) -> int:
        num_bytes = self._receive(buffers)
        if not num_bytes:
            raise ConnectionError("the server ended the connection")
        return num_bytes


def _number(text: bytes) -> int:
    # int() alone takes spaces, underscores and signs that the protocol does not know.
    if not text.removeprefix(b"-").isdigit() or len(text) > 20:
        raise ProtocolError(f"{text[:20]!r} is no number")
    return int(text)
