"""The engines that compute prompts for this one: who answers, and how much each has to do."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Sequence

from trencadis.errors import TransferError
from trencadis.records import TransferCause
from trencadis_kv.connectors.p2p.params import RemotePrefix, address_of
from trencadis_kv.connectors.p2p.peer import PeerConnection
from trencadis_kv.wire.handshake import Identity
from trencadis_kv.wire.stream_messages import State

__all__ = ["PrefillEngine", "PrefillPool"]

logger = logging.getLogger("trencadis.kv.p2p")


class PrefillEngine:
    """One engine that was named, as it is seen from here. Written by its thread, read by any.

    Args:
        name: Its address, as the config says.

    Attributes:
        name: As given.
        host: Of it.
        port: Of it.
        state: What it said last; None: it does not answer, or takes no prompts.
        rtt_s: Seconds from the question to that.
        num_sent_tokens: Of prompts sent there since it said so: what comes at once must not all go to one.
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
        """Where it is; it holds nothing for us yet."""
        return RemotePrefix(engine="", hold_id="", host=self.host, port=self.port, num_tokens=0, lease_s=0.0)

    @property
    def num_waiting_tokens(self) -> int:
        """Queued tokens of that engine, as far as is known."""
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
        """Learn that it does not answer; said once, and again when the cause is another."""
        self.state = None
        if error.cause != self._why:
            self._why = error.cause
            level = logging.ERROR if error.cause == TransferCause.INCOMPATIBLE else logging.WARNING
            logger.log(level, "No prompts go to the engine at %s: %s It is asked again.", self.name, error)

    def affinity(self, block_hash: bytes) -> float:
        """Return a number, 0 .. 1, that is large for the same engine whenever a prompt begins alike. Pure.

        Source: rendezvous hashing (Thaler and Ravishankar, 1998).
        """
        digest = hashlib.blake2b(self.name.encode() + block_hash, digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64


class PrefillPool:
    """Asks every named engine again and again, one thread each.

    Args:
        names: Addresses.
        connect_timeout_s: The longest that each step of a question takes.
        heartbeat_s: From question to question.

    Attributes:
        engines: All that were named.
    """

    def __init__(self, names: Sequence[str], *, connect_timeout_s: float, heartbeat_s: float) -> None:
        self.engines = tuple(PrefillEngine(name) for name in dict.fromkeys(names))
        self._timeout_s = connect_timeout_s
        self._heartbeat_s = heartbeat_s
        self._end = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, me: Identity) -> None:
        """Begin to ask."""
        for engine in self.engines:
            thread = threading.Thread(target=self._watch, args=(engine, me), name="trencadis-p2p-watch", daemon=True)
            self._threads.append(thread)
            thread.start()

    def ready(self) -> list[PrefillEngine]:
        """Return those that take prompts now."""
        return [engine for engine in self.engines if engine.state is not None]

    def close(self) -> None:
        """Ask no more; may be called twice."""
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
