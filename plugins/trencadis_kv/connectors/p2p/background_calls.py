"""Short calls to other engines whose results are not waited for: release blocks, or renew a lease."""

from __future__ import annotations

import logging
import queue
import threading
from typing import Final

from trencadis.errors import TransferError
from trencadis_kv.connectors.p2p.params import RemotePrefix
from trencadis_kv.connectors.p2p.peer import PeerConnection
from trencadis_kv.connectors.p2p.peers import Peers
from trencadis_kv.wire.handshake import Identity

__all__ = ["BackgroundCalls"]

logger = logging.getLogger("trencadis.kv.p2p")

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
        """Let an engine give up what it holds; does not wait."""
        self._put(("release", prefix))

    def renew(self, prefix: RemotePrefix) -> None:
        """Let an engine hold what it holds for another lease; does not wait."""
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
