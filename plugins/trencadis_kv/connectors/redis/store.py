"""Blocks in a Redis or Valkey server, one key each; failures become transfer errors."""

from __future__ import annotations

import math
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from trencadis.errors import TransferError
from trencadis.interfaces.block_store import BlockStore
from trencadis.records import TransferCause
from trencadis_kv.connectors.redis.config import RedisAddress
from trencadis_kv.connectors.redis.link import RedisLink
from trencadis_kv.connectors.redis.resp import ProtocolError, ServerError, command, set_command

__all__ = ["RedisStore", "transfer_error"]

_SIGN_IN = "Set kv_connector.redis.password, and the user in kv_connector.redis.url, to those that the server knows."
_HINTS = {
    "NOAUTH": _SIGN_IN,
    "WRONGPASS": _SIGN_IN,
    "NOPERM": "The user needs ping, select, get, set, exists and unlink; info and config|get for advice at start-up.",
    "DENIED": "The server is in protected mode: give it a password, or let it listen on a unix socket.",
    "READONLY": "It is a replica: name the primary in kv_connector.redis.url.",
    "MASTERDOWN": "It is a replica whose primary is away: name the primary in kv_connector.redis.url.",
    "MISCONF": "The server writes nothing because it cannot save to its disk; a store of KV blocks needs no disk: save ''.",
    "MOVED": "It is a node of a cluster: name a server that is alone in kv_connector.redis.url.",
    "CLUSTERDOWN": "It is a node of a cluster: name a server that is alone in kv_connector.redis.url.",
    "OOM": "Raise maxmemory, or set maxmemory-policy allkeys-lfu.",
}
_PASSING = {"LOADING", "BUSY", "TRYAGAIN"}
"""Error codes of a server that recovers by itself."""


def transfer_error(error: Exception, address: RedisAddress, *, is_interrupted: bool = False) -> TransferError:
    """Return the transfer error for an exception of a link. Pure.

    Args:
        error: ``OSError``, ``ServerError`` or ``ProtocolError``.
        address: Address of the server.
        is_interrupted: Whether this side ended the connection.
    """
    if is_interrupted:
        return TransferError(f"the call to {address} was interrupted.", cause=TransferCause.CANCELLED)
    if isinstance(error, ServerError):
        return _of_answer(error, address)
    if isinstance(error, ProtocolError):
        return TransferError(
            f"{address} speaks no RESP2: {error}.",
            cause=TransferCause.CORRUPT,
            hint="If this is a Redis or Valkey server, something on the way changes bytes.",
        )
    if isinstance(error, TimeoutError):
        return TransferError(f"{address} does not answer in time.", cause=TransferCause.DEADLINE)
    if isinstance(error, ssl.SSLError):
        return TransferError(
            f"no TLS with {address}: {error}.",
            cause=TransferCause.UNREACHABLE,
            hint="Set kv_connector.redis.tls_ca_path to the certificate of who signed the server's.",
        )
    return TransferError(
        f"{address} cannot be reached: {error}.",
        cause=TransferCause.UNREACHABLE,
        hint="Start it there, or correct kv_connector.redis.url.",
    )


def _of_answer(error: ServerError, address: RedisAddress) -> TransferError:
    if error.code == "OOM":
        cause = TransferCause.FULL
    elif error.code in _HINTS or error.code in _PASSING or "max number of clients" in str(error):
        cause = TransferCause.UNREACHABLE
    else:
        cause = TransferCause.RAISED
    return TransferError(f"{address} answered: {error}", cause=cause, hint=_HINTS.get(error.code, ""))


T = TypeVar("T")

_WINDOW_BYTES = 2**20
_WINDOW_COMMANDS = 128
"""Bytes and commands sent before the replies to earlier commands are read: round trips overlap, and the server buffers
little for one connection."""


class RedisStore(BlockStore):
    """One connection, opened on first use and closed at the first fault.

    Args:
        make_link: Returns a link that is not open yet.
        address: Address of the server, for messages.
        ttl_s: Lifetime of an object on the server, seconds; 0: unlimited.
        on_connect: Called after a connection was made, on the thread of the call that needed it.
    """

    def __init__(
        self,
        make_link: Callable[[], RedisLink],
        address: RedisAddress,
        *,
        ttl_s: int = 0,
        on_connect: Callable[[], None] = lambda: None,
    ) -> None:
        self._make_link = make_link
        self._address = address
        self._ttl_s = ttl_s
        self._on_connect = on_connect
        self._lock = threading.Lock()
        self._link: RedisLink | None = None
        self._is_busy = self._is_closed = False

    def contains(self, keys: Sequence[str]) -> int:
        """Return how many leading keys exist, in at most two round trips: EXISTS only counts."""
        names = [key.encode() for key in keys]

        def ask(link: RedisLink) -> int:
            width = max(1, math.isqrt(len(names)))
            first = _num_leading(link, [names[at : at + width] for at in range(0, len(names), width)]) * width
            rest = names[first : first + width]
            return first + _num_leading(link, [[name] for name in rest[:-1]]) if rest[1:] else min(first, len(names))

        return self._call(ask) if names else 0

    def get(self, keys: Sequence[str], targets: Sequence[memoryview]) -> Sequence[int]:
        """Read objects into memory."""
        sizes: list[int] = []

        def send(link: RedisLink, group: slice) -> None:
            link.send([b"".join([command(b"GET", key.encode()) for key in keys[group]])])

        def read(link: RedisLink, group: slice) -> bool:
            sizes.extend(_read_value(link, target) for target in targets[group])
            return True

        self._call(lambda link: _pipelined(link, _groups([len(target) for target in targets]), send, read))
        return sizes

    def put(self, keys: Sequence[str], objects: Sequence[Sequence[memoryview]]) -> int:
        """Store objects; stops soon after the server is full."""
        num_kept = 0

        def send(link: RedisLink, group: slice) -> None:
            some = zip(keys[group], objects[group], strict=True)
            link.send(part for key, pieces in some for part in set_command(key.encode(), pieces, ttl_s=self._ttl_s))

        def read(link: RedisLink, group: slice) -> bool:
            nonlocal num_kept
            kept = [_read_kept(link) for _ in keys[group]]
            num_kept += sum(kept)
            return all(kept)

        sizes = [sum(piece.nbytes for piece in pieces) for pieces in objects]
        self._call(lambda link: _pipelined(link, _groups(sizes), send, read))
        return num_kept

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; the server frees them in the background."""

        def send(link: RedisLink, group: slice) -> None:
            link.send([command(b"UNLINK", *[key.encode() for key in keys[group]])])

        def read(link: RedisLink, group: slice) -> bool:
            link.reader.read_integer()
            return True

        self._call(lambda link: _pipelined(link, _groups([0] * len(keys)), send, read))

    def interrupt(self) -> None:
        """Make a call that another thread waits for raise soon, by closing the connection."""
        with self._lock:
            link = self._link if self._is_busy else None
        if link is not None:
            link.interrupt()

    def close(self) -> None:
        """Close the connection; running and later calls raise."""
        with self._lock:
            self._is_closed = True
            link, is_busy = self._link, self._is_busy
            if not is_busy:
                self._link = None
        if link is None:
            return
        if is_busy:
            link.interrupt()  # the thread in the call closes it: a descriptor must not be closed while it is in use
        else:
            link.close()

    def _call(self, do: Callable[[RedisLink], T]) -> T:
        link, is_new = self._begin()
        is_done = False
        try:
            if is_new:
                link.open()
                self._on_connect()
            result = do(link)
            is_done = True
            return result
        except (OSError, ProtocolError, ServerError) as error:
            raise transfer_error(error, self._address, is_interrupted=link.is_interrupted) from error
        finally:
            self._end(link, keep=is_done and not link.is_interrupted)

    def _begin(self) -> tuple[RedisLink, bool]:
        with self._lock:
            if self._is_closed:
                raise TransferError(f"the connection to {self._address} was closed.", cause=TransferCause.CANCELLED)
            link, is_new = self._link, False
            if link is None or not link.is_quiet():
                if link is not None:
                    link.close()
                link, is_new = self._make_link(), True
                self._link = link
            self._is_busy = True
            return link, is_new

    def _end(self, link: RedisLink, *, keep: bool) -> None:
        with self._lock:
            self._is_busy = False
            if keep and not self._is_closed:
                return
            self._link = None
        link.close()


def _num_leading(link: RedisLink, groups: Sequence[Sequence[bytes]]) -> int:
    """Return how many leading groups of keys exist in full."""
    link.send([b"".join([command(b"EXISTS", *group) for group in groups])])
    are_whole = [link.reader.read_integer() == len(group) for group in groups]
    return [*are_whole, False].index(False)


def _read_value(link: RedisLink, target: memoryview) -> int:
    try:
        return link.reader.read_bulk_into(target)
    except ServerError as error:
        if error.code == "WRONGTYPE":  # another program's list or hash under our key
            return -1
        raise


def _read_kept(link: RedisLink) -> bool:
    try:
        link.reader.read_status()
    except ServerError as error:
        if error.code == "OOM":
            return False
        raise
    return True


def _groups(sizes: Sequence[int]) -> Iterator[slice]:
    """Yield slices of items that fit one window."""
    first = num_bytes = 0
    for at, size in enumerate(sizes):
        if at > first and (num_bytes + size > _WINDOW_BYTES or at - first == _WINDOW_COMMANDS):
            yield slice(first, at)
            first, num_bytes = at, 0
        num_bytes += size
    if first < len(sizes):
        yield slice(first, len(sizes))


def _pipelined(
    link: RedisLink,
    groups: Iterable[slice],
    send: Callable[[RedisLink, slice], None],
    read: Callable[[RedisLink, slice], bool],
) -> None:
    """Send each group before the replies to the previous one are read; stops once ``read`` returns False."""
    sent: deque[slice] = deque()
    for group in groups:
        send(link, group)
        sent.append(group)
        if len(sent) > 1 and not read(link, sent.popleft()):
            break
    for group in sent:
        read(link, group)
