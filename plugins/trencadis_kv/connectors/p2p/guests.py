"""Prompts that this engine computes for others: from the invitation to the offer of its blocks.

server thread   enter ─────────────────▶ wait ─▶ OFFER | ABORT
engine thread     └▶ take ─▶ it runs ─▶ ended ─┘
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trencadis.errors import TransferError, TrencadisError
from trencadis.records import FirstToken, Request, SamplingParams, TransferCause
from trencadis_kv.connectors.p2p.params import RemotePrefix
from trencadis_kv.wire.stream_messages import Invite

__all__ = ["Guest", "Guests"]


class Guest:
    """One prompt of another engine.

    Args:
        request: As this engine runs it.
        is_sampled: Its token is chosen as the other engine would.

    Attributes:
        request: As given.
        first: Its token, once it is there, if the other engine can use it; else None.
        prefix: Where its blocks are, once they are computed; else None.
        error: Why there are none.
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
        """Note how it ended."""
        self.prefix, self.error = prefix, error
        self._done.set()


class Guests:
    """Who is here. From any thread.

    Args:
        max_guests: At once.
        release: Gives up a hold by its name: its guest is not wanted any more.

    Attributes:
        accepts: False: nobody else is let in.
        num_backlog_tokens: What the engine said last of the tokens that wait in it.
        wake: Wakes the engine.
        unpack: Reads the terms of a first token; None: they do not hold here.
    """

    def __init__(self, max_guests: int, *, release: Callable[[str], object]) -> None:
        self._max_guests = max_guests
        self._release = release
        self._lock = threading.Lock()
        self._guests: dict[str, Guest] = {}
        self._new: list[Guest] = []
        self._withdrawn: list[str] = []
        self.accepts = True
        self.num_backlog_tokens = 0
        self.wake: Callable[[], None] = lambda: None
        self.unpack: Callable[[bytes], SamplingParams | None] = lambda _: None

    @property
    def num_guests(self) -> int:
        """Prompts taken and not computed yet."""
        return len(self._guests)

    @property
    def num_tokens(self) -> int:
        """Tokens that wait here: of everybody in the engine, and of prompts that it has not seen yet."""
        with self._lock:
            return self.num_backlog_tokens + sum(len(guest.request.prompt_token_ids) for guest in self._new)

    def enter(self, invite: Invite) -> Guest:
        """Take a prompt.

        Raises:
            TransferError: ``full``: too many are here, or this engine takes none. ``raised``: it is no prompt.
        """
        params = self.unpack(invite.terms) if invite.terms else None
        request = _request_of(invite, params or SamplingParams(max_tokens=1, temperature=0.0))
        with self._lock:
            if not self.accepts:
                raise TransferError("This engine computes no prompts of others.", cause=TransferCause.FULL)
            if len(self._guests) >= self._max_guests:
                raise TransferError(
                    f"This engine computes {self._max_guests} prompts of others already.", cause=TransferCause.FULL
                )
            guest = self._guests[request.request_id] = Guest(request, is_sampled=params is not None)
            self._new.append(guest)
        self.wake()
        return guest

    def withdraw(self, guest: Guest) -> None:
        """Learn that nobody wants a prompt any more; whatever becomes of it, its blocks are given up."""
        with self._lock:
            guest.is_wanted = False
            if guest in self._new:
                self._new.remove(guest)
                del self._guests[guest.request.request_id]
            elif guest.request.request_id in self._guests:
                self._withdrawn.append(guest.request.request_id)
        if guest.prefix is not None:
            self._release(guest.prefix.ticket)
        self.wake()

    def take_new(self) -> Sequence[Request]:
        """Return and forget the requests that came. Engine thread."""
        with self._lock:
            new, self._new = self._new, []
        return [guest.request for guest in new]

    def take_withdrawn(self) -> Sequence[str]:
        """Return and forget the ids of requests that are not wanted any more. Engine thread."""
        with self._lock:
            withdrawn, self._withdrawn = self._withdrawn, []
        return withdrawn

    def said(self, request_id: str, first: FirstToken) -> None:
        """Learn the token of one. Engine thread."""
        with self._lock:
            guest = self._guests.get(request_id)
        if guest is not None and guest.is_sampled:
            guest.first = first

    def ended(self, request_id: str, transfer_params: Mapping[str, Any] | None, error: str) -> None:
        """Learn how one ended. Engine thread."""
        prefix = RemotePrefix.of(transfer_params)
        with self._lock:
            guest = self._guests.pop(request_id, None)
            if guest is None:
                return
            is_wanted = guest.is_wanted
            guest.end(prefix, error)
        if prefix is not None and not is_wanted:
            self._release(prefix.ticket)

    def close(self) -> None:
        """Let nobody wait any more; may be called twice."""
        with self._lock:
            self.accepts = False
            guests, self._guests = list(self._guests.values()), {}
            self._new.clear()
        for guest in guests:
            guest.end(None, "this engine ends")


def _request_of(invite: Invite, params: SamplingParams) -> Request:
    if not invite.tokens or len(invite.tokens) % 4:
        raise TransferError(f"{len(invite.tokens)} bytes are no prompt.", cause=TransferCause.RAISED)
    try:
        return Request(
            request_id=f"guest-{uuid.uuid4().hex}",
            prompt_token_ids=tuple(np.frombuffer(invite.tokens, "<i4").tolist()),
            params=params,
            tenant=invite.tenant,
            cache_salt=invite.cache_salt,
            adapter=invite.adapter,
            priority=invite.priority,
            weight=invite.weight,
            transfer_params={"do_remote_decode": True},
        )
    except TrencadisError as error:
        raise TransferError(f"That is no prompt: {error}", cause=TransferCause.RAISED) from error
