"""Remote prefills: requests of other engines that run here, and their blocks, held until released.

server thread   enter ─────────────────▶ wait ─▶ PREFILL_RESPONSE | ABORT
engine thread     └▶ take ─▶ it runs ─▶ ended ─┘

A hold ends when the other engine releases it, when its lease is over, or at the latest after ``max_hold_s``; blocks are given back once
no reader is left. A reader that would keep them longer loses its connection.
"""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from trencadis.clock import Clock
from trencadis.errors import TransferError, TrencadisError
from trencadis.records import FirstToken, Request, SamplingParams, TransferCause
from trencadis_kv.connectors.p2p.params import RemotePrefix
from trencadis_kv.wire.stream_messages import PrefillRequest

__all__ = ["Hold", "Holds", "RemotePrefill", "RemotePrefills"]


class RemotePrefill:
    """A request whose prefill this engine computes for another one.

    Args:
        request: Request as this engine runs it.
        is_sampled: Whether the first token is sampled as the other engine would.

    Attributes:
        request: Request as this engine runs it.
        first: First token, if the other engine can use it; None until there is one.
        prefix: Location of the blocks; None until they are computed.
        error: Reason why there are no blocks; empty otherwise.
    """

    def __init__(self, request: Request, *, is_sampled: bool = False) -> None:
        self.request = request
        self.is_sampled = is_sampled
        self.first: FirstToken | None = None
        self.prefix: RemotePrefix | None = None
        self.error = ""
        self.is_wanted = True
        self._done = threading.Event()

    def wait(self, timeout_s: float) -> bool:
        """Return whether it has ended, at the latest after ``timeout_s``."""
        return self._done.wait(timeout_s)

    def end(self, prefix: RemotePrefix | None, error: str) -> None:
        """Set the result."""
        self.prefix, self.error = prefix, error
        self._done.set()


class RemotePrefills:
    """Remote prefills of this engine that have not ended. From any thread.

    Args:
        max_remote_prefills: Maximum number of remote prefills at once.
        release: Releases a hold by its name; called after a withdrawal.

    Attributes:
        accepts: Whether further requests are accepted.
        num_backlog_tokens: Queued tokens of the engine, by its last report.
        wake: Wakes the engine.
        unpack: Decodes a sampling fingerprint to parameters; returns None if this engine samples otherwise.
    """

    def __init__(self, max_remote_prefills: int, *, release: Callable[[str], object]) -> None:
        self._max_remote_prefills = max_remote_prefills
        self._release = release
        self._lock = threading.Lock()
        self._remote_prefills: dict[str, RemotePrefill] = {}
        self._new: list[RemotePrefill] = []
        self._withdrawn: list[str] = []
        self.accepts = True
        self.num_backlog_tokens = 0
        self.wake: Callable[[], None] = lambda: None
        self.unpack: Callable[[bytes], SamplingParams | None] = lambda _: None

    @property
    def num_remote_prefills(self) -> int:
        """Accepted prefills that are not computed yet."""
        return len(self._remote_prefills)

    @property
    def num_tokens(self) -> int:
        """Queued tokens: those in the engine, and of prompts that it has not taken yet."""
        with self._lock:
            return self.num_backlog_tokens + sum(len(prefill.request.prompt_token_ids) for prefill in self._new)

    def enter(self, message: PrefillRequest) -> RemotePrefill:
        """Accept a prefill request.

        Raises:
            TransferError: ``full``: the limit is reached, or this engine accepts none. ``raised``: the message holds no
                prompt.
        """
        params = self.unpack(message.sampling) if message.sampling else None
        request = _request_of(message, params or SamplingParams(max_tokens=1, temperature=0.0))
        with self._lock:
            if not self.accepts:
                raise TransferError("This engine computes no prompts of others.", cause=TransferCause.FULL)
            if len(self._remote_prefills) >= self._max_remote_prefills:
                raise TransferError(
                    f"This engine computes {self._max_remote_prefills} prompts of others already.",
                    cause=TransferCause.FULL,
                )
            prefill = self._remote_prefills[request.request_id] = RemotePrefill(request, is_sampled=params is not None)
            self._new.append(prefill)
        self.wake()
        return prefill

    def withdraw(self, prefill: RemotePrefill) -> None:
        """Withdraw a prefill; its blocks are released in any case."""
        with self._lock:
            prefill.is_wanted = False
            if prefill in self._new:
                self._new.remove(prefill)
                del self._remote_prefills[prefill.request.request_id]
            elif prefill.request.request_id in self._remote_prefills:
                self._withdrawn.append(prefill.request.request_id)
        if prefill.prefix is not None:
            self._release(prefill.prefix.hold_id)
        self.wake()

    def take_new(self) -> Sequence[Request]:
        """Return and clear the new requests. Engine thread."""
        with self._lock:
            new, self._new = self._new, []
        return [prefill.request for prefill in new]

    def take_withdrawn(self) -> Sequence[str]:
        """Return and clear the ids of withdrawn requests. Engine thread."""
        with self._lock:
            withdrawn, self._withdrawn = self._withdrawn, []
        return withdrawn

    def set_token(self, request_id: str, first: FirstToken) -> None:
        """Set the first token of a prefill. Engine thread."""
        with self._lock:
            prefill = self._remote_prefills.get(request_id)
        if prefill is not None and prefill.is_sampled:
            prefill.first = first

    def ended(self, request_id: str, transfer_params: Mapping[str, Any] | None, error: str) -> None:
        """Set the result of a prefill. Engine thread."""
        prefix = RemotePrefix.of(transfer_params)
        with self._lock:
            prefill = self._remote_prefills.pop(request_id, None)
            if prefill is None:
                return
            is_wanted = prefill.is_wanted
            prefill.end(prefix, error)
        if prefix is not None and not is_wanted:
            self._release(prefix.hold_id)

    def close(self) -> None:
        """End all waits; may be called twice."""
        with self._lock:
            self.accepts = False
            remote_prefills, self._remote_prefills = list(self._remote_prefills.values()), {}
            self._new.clear()
        for prefill in remote_prefills:
            prefill.end(None, "this engine ends")


def _request_of(message: PrefillRequest, params: SamplingParams) -> Request:
    if not message.tokens or len(message.tokens) % 4:
        raise TransferError(f"{len(message.tokens)} bytes are no prompt.", cause=TransferCause.RAISED)
    try:
        return Request(
            request_id=f"prefill-{uuid.uuid4().hex}",
            prompt_token_ids=tuple(np.frombuffer(message.tokens, "<i4").tolist()),
            params=params,
            tenant=message.tenant,
            cache_salt=message.cache_salt,
            priority=message.priority,
            weight=message.weight,
            transfer_params={"do_remote_decode": True},
        )
    except TrencadisError as error:
        raise TransferError(f"That is no prompt: {error}", cause=TransferCause.RAISED) from error


@attrs.define(kw_only=True, eq=False)
class Hold:
    """Blocks of one finished prefill.

    Attributes:
        transfer_id: Id for the engine.
        name: Id for other engines; cannot be guessed.
        index: Block ids by block hash.
        num_bytes: Bytes of all blocks.
        expires_s: End of the lease, engine clock.
        ends_s: Latest end of the hold, engine clock.
        is_over: True once it was released, or its time is up.
        readers: Functions that each cut the connection of one reader.
    """

    transfer_id: int
    name: str
    index: Mapping[bytes, int]
    num_bytes: int
    expires_s: float
    ends_s: float
    is_over: bool = False
    readers: list[Callable[[], None]] = attrs.Factory(list)


class Holds:
    """Held blocks of this engine, as a producer. From any thread.

    Args:
        clock: Source of time.
        lease_s: Lease of a new or renewed hold, seconds.
        max_hold_s: Longest time of a hold, seconds.
        max_bytes: Maximum bytes of all holds.

    Attributes:
        ends: Number of holds by end: ``released`` or ``expired``; ``refused`` counts those beyond ``max_bytes``.
    """

    def __init__(self, clock: Clock, *, lease_s: float, max_hold_s: float, max_bytes: int) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._max_hold_s = max_hold_s
        self._max_bytes = max_bytes
        self._by_name: dict[str, Hold] = {}
        self._num_bytes = 0
        self._lock = threading.Lock()
        self.ends: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return self._num_bytes

    @property
    def num_holds(self) -> int:
        """Prefills held now."""
        return len(self._by_name)

    def add(self, transfer_id: int, name: str, index: Mapping[bytes, int], *, num_bytes: int) -> bool:
        """Hold blocks; False if the limit of bytes is reached."""
        with self._lock:
            if self._num_bytes + num_bytes > self._max_bytes:
                self.ends["refused"] += 1
                return False
            now_s = self._clock.now_s()
            ends_s = now_s + self._max_hold_s
            self._by_name[name] = Hold(
                transfer_id=transfer_id,
                name=name,
                index=index,
                num_bytes=num_bytes,
                expires_s=min(ends_s, now_s + self._lease_s),
                ends_s=ends_s,
            )
            self._num_bytes += num_bytes
            return True

    def open(self, name: str, cut: Callable[[], None]) -> Hold:
        """Return a hold for reading; its blocks stay until :meth:`close`.

        Args:
            name: Name of the hold.
            cut: Cuts the reader's connection if it reads for too long; must not wait.

        Raises:
            TransferError: ``lost``: there is no such hold, or it has ended.
        """
        with self._lock:
            hold = self._by_name.get(name)
            if hold is None or hold.is_over:
                raise TransferError("The blocks are not held any more.", cause=TransferCause.LOST)
            hold.readers.append(cut)
            return hold

    def close(self, hold: Hold, cut: Callable[[], None]) -> None:
        """Called when a reader has finished."""
        with self._lock:
            hold.readers.remove(cut)
            hold.expires_s = min(hold.ends_s, self._clock.now_s() + self._lease_s)

    def renew(self, name: str) -> bool:
        """Renew the lease of a hold; False if there is no such hold."""
        with self._lock:
            hold = self._by_name.get(name)
            if hold is None or hold.is_over:
                return False
            hold.expires_s = min(hold.ends_s, self._clock.now_s() + self._lease_s)
            return True

    def release(self, name: str) -> bool:
        """End a hold; False if there is no such hold."""
        with self._lock:
            hold = self._by_name.get(name)
            if hold is None or hold.is_over:
                return False
            self._end(hold, "released")
            return True

    def take_free(self) -> tuple[int, ...]:
        """Return and clear the transfer ids of ended holds without readers; called every step."""
        if not self._by_name:
            return ()
        now_s = self._clock.now_s()
        with self._lock:
            for hold in self._by_name.values():
                if now_s >= hold.ends_s or (now_s >= hold.expires_s and not hold.readers):
                    if not hold.is_over:
                        self._end(hold, "expired")
                    for cut in hold.readers:
                        cut()
            free = [hold for hold in self._by_name.values() if hold.is_over and not hold.readers]
            for hold in free:
                del self._by_name[hold.name]
                self._num_bytes -= hold.num_bytes
            return tuple([hold.transfer_id for hold in free])

    def _end(self, hold: Hold, how: str) -> None:
        hold.is_over = True
        self.ends[how] += 1
