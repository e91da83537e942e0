"""Other engines: sources of pulls, prefill engines, and short background calls to them."""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import Final

from trencadis.clock import Clock
from trencadis.errors import TransferError
from trencadis.records import TransferCause
from trencadis_kv.connectors.p2p.params import ANY_PORT, RemotePrefix, address_of, peer_of
from trencadis_kv.connectors.p2p.peer import PeerConnection
from trencadis_kv.store.bounded import BoundedDict
from trencadis_kv.wire.handshake import Identity
from trencadis_kv.wire.stream_messages import State

__all__ = ["BackgroundCalls", "Peers", "PrefillEngine", "PrefillPool"]

logger = logging.getLogger("trencadis.kv.p2p")

_MAX_ENTRIES: Final = 1024
_MAX_LOGGED: Final = 64
"""Most refused addresses that are logged: clients may make up any number."""
_NEVER: Final = float("inf")
_MAX_WAITING: Final = 1024
"""Most queued background calls; more are dropped, since a lease expires by itself."""


class Peers:
    """Allowed engines and their failures. From any thread.

    Args:
        allowed: Allowed peers, each as parsed by :func:`peer_of`.
        clock: Source of time.
        retry_s: Seconds for which an unreachable engine is not used; an incompatible one is never used again.
        name: Name of the connector.
    """

    def __init__(self, allowed: Sequence[str], clock: Clock, *, retry_s: float, name: str = "p2p") -> None:
        self._name = name
        peers = [peer_of(one) for one in allowed]
        self._hosts = frozenset((host, port) for host, port in peers if isinstance(host, str))
        self._networks = [(network, port) for network, port in peers if not isinstance(network, str)]
        self._clock = clock
        self._retry_s = retry_s
        self._down_until_s: BoundedDict[tuple[str, int, str], float] = BoundedDict(_MAX_ENTRIES)
        self._logged: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    @property
    def num_down(self) -> int:
        """Number of engines that are not used now."""
        now_s = self._clock.now_s()
        with self._lock:
            return sum(until_s > now_s for until_s in self._down_until_s.values())

    def allows(self, host: str, port: int) -> bool:
        """Return whether blocks may be pulled from an address; logs the first refusal."""
        ports = (port, ANY_PORT)
        if any((host.lower(), one) in self._hosts for one in ports) or self._is_in_network(host, ports):
            return True
        with self._lock:
            is_new = (host, port) not in self._logged and len(self._logged) < _MAX_LOGGED
            if is_new:
                self._logged.add((host, port))
        if is_new:
            logger.warning(
                "A request has its prefix at %s, port %d, which kv_connector.%s.peers does not name: its prompt is computed here.%s",
                ascii(host)[1:-1],
                port,
                self._name,
                " No more such addresses are logged." if len(self._logged) == _MAX_LOGGED else "",
            )
        return False

    def is_down(self, prefix: RemotePrefix) -> bool:
        """Return whether an engine is not to be used now."""
        with self._lock:
            return self._down_until_s.get(_key(prefix), 0.0) > self._clock.now_s()

    def failed(self, prefix: RemotePrefix, error: TransferError) -> None:
        """Record that a pull from an engine failed."""
        if error.cause == TransferCause.INCOMPATIBLE:
            until_s = _NEVER
        elif error.cause in (TransferCause.UNREACHABLE, TransferCause.DEADLINE):
            until_s = self._clock.now_s() + self._retry_s
        else:
            return
        with self._lock:
            is_new = self._down_until_s.get(_key(prefix)) != until_s == _NEVER
            self._down_until_s[_key(prefix)] = until_s
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


class BackgroundCalls:
    """Makes calls on one thread, which starts with the first.

    Args:
        peers: Records engines that cannot be reached.
        connect_timeout_s: Longest time for each step of a call, seconds.

    Attributes:
        identity: Identity of this engine; set before the first call.
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
        """Finish queued calls, for at most the time of one call, and stop; may be called twice."""
        with self._lock:
            self._is_closed = True
        if self._thread is not None:
            self._put(None)
            self._thread.join(2 * self._timeout_s)

    def _put(self, call: tuple[str, RemotePrefix] | None) -> None:
        with self._lock:  # failed pulls call this from threads of their own
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


class PrefillEngine:
    """One configured prefill engine and its last status. Written by its thread, read by any.

    Args:
        name: Address from the configuration, ``host:port``.

    Attributes:
        name: Address from the configuration, ``host:port``.
        host: Host of the address.
        port: Port of the address.
        state: Last status; None: the engine does not respond, or accepts no prompts.
        rtt_s: Round-trip time of the last status, seconds.
        num_sent_tokens: Tokens of prompts sent there since the last status; spreads prompts that come at once over
            several engines.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.host, self.port = address_of(name)
        self.state: State | None = None
        self.rtt_s = 0.0
        self.num_sent_tokens = 0
        self._why = ""

    @property
    def prefix(self) -> RemotePrefix:
        """Address of the engine, as a prefix without blocks."""
        return RemotePrefix(engine="", hold_id="", host=self.host, port=self.port, num_tokens=0, lease_s=0.0)

    @property
    def num_waiting_tokens(self) -> int:
        """Queued tokens of that engine, as of its last status and the prompts sent since."""
        state = self.state
        return self.num_sent_tokens + (0 if state is None else state.num_tokens)

    def update(self, state: State, rtt_s: float) -> None:
        """Update from its status message."""
        if self.state is None and state.accepts:
            logger.info("Engine at %s computes prompts for this one.", self.name)
        self._why = ""
        self.rtt_s, self.num_sent_tokens = rtt_s, 0
        self.state = state if state.accepts else None

    def lost(self, error: TransferError) -> None:
        """Record that it does not respond; logged once per cause."""
        self.state = None
        if error.cause != self._why:
            self._why = error.cause
            level = logging.ERROR if error.cause == TransferCause.INCOMPATIBLE else logging.WARNING
            logger.log(level, "No prompts go to the engine at %s: %s It is asked again.", self.name, error)

    def affinity(self, block_hash: bytes) -> float:
        """Return a number, 0 .. 1, for a prompt's beginning; largest at the engine preferred for it. Pure.

        Source: rendezvous hashing (Thaler and Ravishankar, 1998).
        """
        digest = hashlib.blake2b(self.name.encode() + block_hash, digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64


class PrefillPool:
    """Polls the status of every configured prefill engine, one thread each.

    Args:
        names: Addresses of the engines, ``host:port``.
        connect_timeout_s: Longest time for each step of a poll, seconds.
        heartbeat_s: Time between two polls, seconds.

    Attributes:
        engines: All configured engines.
    """

    def __init__(self, names: Sequence[str], *, connect_timeout_s: float, heartbeat_s: float) -> None:
        self.engines = tuple(PrefillEngine(name) for name in dict.fromkeys(names))
        self._timeout_s = connect_timeout_s
        self._heartbeat_s = heartbeat_s
        self._end = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, me: Identity) -> None:
        """Start to poll."""
        for engine in self.engines:
            thread = threading.Thread(target=self._watch, args=(engine, me), name="trencadis-p2p-watch", daemon=True)
            self._threads.append(thread)
            thread.start()

    def ready(self) -> list[PrefillEngine]:
        """Return the engines that accept prefills now."""
        return [engine for engine in self.engines if engine.state is not None]

    def close(self) -> None:
        """Stop polling; may be called twice."""
        self._end.set()
        for thread in self._threads:
            thread.join(3 * self._timeout_s)

    def _watch(self, engine: PrefillEngine, me: Identity) -> None:
        while not self._end.is_set():
            try:
                with PeerConnection(engine.prefix, me, connect_timeout_s=self._timeout_s) as connection:
                    while not self._end.is_set():
                        start_s = time.monotonic()
                        engine.update(connection.ask_state(timeout_s=self._timeout_s), time.monotonic() - start_s)
                        self._end.wait(self._heartbeat_s)
            except TransferError as error:
                engine.lost(error)
            self._end.wait(self._heartbeat_s)
