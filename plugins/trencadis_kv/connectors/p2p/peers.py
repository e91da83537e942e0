"""Other engines that blocks are pulled from, and short calls to them in the background: release blocks, or renew a lease."""

from __future__ import annotations

import ipaddress
import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, TypeVar

from trencadis.clock import Clock
from trencadis.errors import TransferError
from trencadis.records import TransferCause
from trencadis_kv.connectors.p2p.params import ANY_PORT, RemotePrefix, peer_of
from trencadis_kv.connectors.p2p.peer import PeerConnection
from trencadis_kv.wire.handshake import Identity

__all__ = ["BackgroundCalls", "Peers"]

logger = logging.getLogger("trencadis.kv.p2p")

_MAX_REMEMBERED: Final = 1024
_MAX_STRANGERS: Final = 64
"""Addresses in the log that are not named: clients may make up any number."""
_KeyT = TypeVar("_KeyT")
_ValueT = TypeVar("_ValueT")
_NEVER: Final = float("inf")


class Peers:
    """What is known of other engines. From any thread.

    Args:
        allowed: Addresses see :func:`peer_of`.
        clock: Source of time.
        retry_s: One that could not be reached is left alone for so long; one whose blocks are of another kind for good.
        name: Of the connector.
    """

    def __init__(self, allowed: Sequence[str], clock: Clock, *, retry_s: float, name: str = "p2p") -> None:
        self._name = name
        peers = [peer_of(one) for one in allowed]
        self._hosts = frozenset((host, port) for host, port in peers if isinstance(host, str))
        self._networks = [(network, port) for network, port in peers if not isinstance(network, str)]
        self._clock = clock
        self._retry_s = retry_s
        self._down_until_s: OrderedDict[tuple[str, int, str], float] = OrderedDict()
        self._strangers: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    @property
    def num_down(self) -> int:
        """Engines that are left alone now."""
        now_s = self._clock.now_s()
        with self._lock:
            return sum(until_s > now_s for until_s in self._down_until_s.values())

    def allows(self, host: str, port: int) -> bool:
        """Return whether blocks may be pulled from an address; the first time it may not is an entry in the log."""
        ports = (port, ANY_PORT)
        if any((host.lower(), one) in self._hosts for one in ports) or self._is_in_network(host, ports):
            return True
        with self._lock:
            is_new = (host, port) not in self._strangers and len(self._strangers) < _MAX_STRANGERS
            if is_new:
                self._strangers.add((host, port))
        if is_new:
            logger.warning(
                "A request has its prefix at %s, port %d, which kv_connector.%s.peers does not name: its prompt is computed here.%s",
                ascii(host)[1:-1],
                port,
                self._name,
                " No more such addresses are logged." if len(self._strangers) == _MAX_STRANGERS else "",
            )
        return False

    def is_down(self, prefix: RemotePrefix) -> bool:
        """Return whether an engine is to be left alone."""
        with self._lock:
            return self._down_until_s.get(_key(prefix), 0.0) > self._clock.now_s()

    def failed(self, prefix: RemotePrefix, error: TransferError) -> None:
        """Learn that an engine could not be pulled from."""
        if error.cause == TransferCause.INCOMPATIBLE:
            until_s = _NEVER
        elif error.cause in (TransferCause.UNREACHABLE, TransferCause.DEADLINE):
            until_s = self._clock.now_s() + self._retry_s
        else:
            return
        with self._lock:
            is_new = self._down_until_s.get(_key(prefix)) != until_s == _NEVER
            _remember(self._down_until_s, _key(prefix), until_s)
        if is_new:
            logger.error(
                "No KV is pulled from engine %s at %s:%d any more: %s", prefix.engine, prefix.host, prefix.port, error
            )

    def _is_in_network(self, host: str, ports: tuple[int, ...]) -> bool:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in network and port in ports for network, port in self._networks)


def _key(prefix: RemotePrefix) -> tuple[str, int, str]:
    return prefix.host, prefix.port, prefix.engine


def _remember(table: OrderedDict[_KeyT, _ValueT], key: _KeyT, value: _ValueT) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > _MAX_REMEMBERED:
        table.popitem(last=False)


_MAX_WAITING: Final = 1024
"""More are forgotten: a lease ends by itself, too."""


class BackgroundCalls:
    """Makes calls on one thread, which starts with the first.

    Args:
        peers: Told of engines that cannot be reached.
        connect_timeout_s: The longest that each step of a call takes.

    Attributes:
        identity: Of this engine; set before the first call.
    """

    def __init__(self, peers: Peers, *, connect_timeout_s: float) -> None:
        self._peers = peers
        self._timeout_s = connect_timeout_s
        self._todo: queue.Queue[tuple[str, RemotePrefix] | None] = queue.Queue(_MAX_WAITING)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self.identity: Identity | None = None

    def release(self, prefix: RemotePrefix) -> None:
        """Release a hold at another engine; does not wait."""
        self._put(("release", prefix))

    def renew(self, prefix: RemotePrefix) -> None:
        """Renew the lease of a hold at another engine; does not wait."""
        self._put(("renew", prefix))

    def close(self) -> None:
        """Make the calls that wait, for no longer than one call takes; may be called twice."""
        with self._lock:
            self._is_closed = True
        if self._thread is not None:
            self._put(None)
            self._thread.join(2 * self._timeout_s)

    def _put(self, call: tuple[str, RemotePrefix] | None) -> None:
        with self._lock:  # pulls that fail come from threads of their own
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="trencadis-p2p-calls", daemon=True)
                self._thread.start()
        try:
            self._todo.put_nowait(call)
        except queue.Full:
            logger.debug("A background call was dropped: %d wait.", _MAX_WAITING)

    def _run(self) -> None:
        while (call := self._todo.get()) is not None:
            what, prefix = call
            if self.identity is None or self._peers.is_down(prefix):
                continue
            try:
                with PeerConnection(prefix, self.identity, connect_timeout_s=self._timeout_s) as connection:
                    send = connection.release if what == "release" else connection.renew
                    send(timeout_s=self._timeout_s)
            except TransferError as error:
                self._peers.failed(prefix, error)
                logger.debug("Engine %s could not be told to %s: %s", prefix.engine, what, error)
