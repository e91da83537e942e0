"""A prefill that another engine computes for this one: the request, the response, and blocks that are sent along.

run ─▶ PREFILL_REQUEST ─▶ PREFILL_RESPONSE: the request may go on ─▶ blocks ─▶ done
                   └ the first token, and where the blocks are
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

import attrs
import numpy as np

from trencadis.errors import TransferError
from trencadis.records import FirstToken, Request, TransferCause
from trencadis_kv.connectors.p2p.params import RemotePrefix
from trencadis_kv.connectors.p2p.peer import PeerConnection
from trencadis_kv.connectors.p2p.prefill_pool import PrefillEngine
from trencadis_kv.connectors.p2p.push import Push
from trencadis_kv.connectors.p2p.token import decode_token
from trencadis_kv.wire.stream_messages import PrefillRequest, PrefillResponse

if TYPE_CHECKING:
    from trencadis_kv.connectors.p2p.node import Node

__all__ = ["DelegatedPrefill"]

logger = logging.getLogger("trencadis.kv.p2p")


class DelegatedPrefill:
    """Asks one engine to compute one prompt; :meth:`run` on a thread of its own, the rest from any.

    Args:
        engine: Which.
        request: Whose prompt.
        node: This engine; its identity is known.
        timeout_s: The longest wait for the response.
        terms: How the first token is to be chosen; empty: it is not wanted.
        push: Takes blocks that are sent along; None: none are wanted.
        num_skipped: Leading blocks of the prompt that are here already.

    Attributes:
        engine: As given.
        prefix: Where the blocks are, once they are offered.
        first: The token after the prompt, if that came with the response.
        error: Why there is no response.
        is_done: There is an response, or an error, or it was withdrawn.
    """

    def __init__(
        self,
        engine: PrefillEngine,
        request: Request,
        node: Node,
        *,
        timeout_s: float,
        terms: bytes = b"",
        push: Push | None = None,
        num_skipped: int = 0,
    ) -> None:
        self.engine = engine
        self._node = node
        self._request = request
        self._timeout_s = timeout_s
        self._terms = terms
        self._push = push
        self._num_skipped = num_skipped
        self._connection: PeerConnection | None = None
        self._lock = threading.Lock()
        self._is_withdrawn = False
        self.prefix: RemotePrefix | None = None
        self.first: FirstToken | None = None
        self.error: TransferError | None = None
        self.is_done = False

    def run(self) -> None:
        """Ask, and wait; whatever happens, :attr:`is_done` says so."""
        error: TransferError | None = None
        try:
            self._run()
        except TransferError as raised:
            error = raised
        except Exception as raised:
            logger.warning("An prefill failed unexpectedly.", exc_info=raised)
            error = TransferError(f"{type(raised).__name__}: {raised}", cause=TransferCause.RAISED)
        finally:
            if self._push is not None:
                self._push.end(error)
                if self.prefix is None:
                    self._push.close()
            if self.prefix is None:
                self.error = error
            elif error is not None and not (self._push is not None and self._push.is_closed):
                self._node.metrics.failed(error.cause)
                logger.debug("Blocks that were sent along broke off: %s", error)
            self.is_done = True

    def withdraw(self) -> None:
        """Want it no more: the other engine drops the prompt."""
        with self._lock:
            self._is_withdrawn = True
            if self._connection is not None:
                self._connection.cut()
        self.hang_up()
        if self.prefix is not None:
            self._node.pushes.take(self.prefix.hold_id)
            self._node.background_calls.release(self.prefix)

    def hang_up(self) -> None:
        """Wait for nothing more; what was offered is released elsewhere."""
        if self._push is not None:
            self._push.close()

    def _run(self) -> None:
        node, prefix = self._node, self.engine.prefix
        if node.identity is None:
            raise TransferError("There is no KV cache yet.", cause=TransferCause.RAISED)
        with PeerConnection(prefix, node.identity, connect_timeout_s=node.config.connect_timeout_s) as connection:
            with self._lock:
                if self._is_withdrawn:
                    raise TransferError("The prompt is not wanted any more.", cause=TransferCause.CANCELLED)
                self._connection = connection
            response = connection.request_prefill(self._message())
            if self._accept(connection.engine, response) and self._push is not None:
                self._receive(connection, response, self._push)

    def _accept(self, engine: str, response: PrefillResponse) -> bool:
        """Let the request go on; False if it is gone."""
        prefix = attrs.evolve(
            self.engine.prefix,
            engine=engine,
            hold_id=response.hold_id,
            num_tokens=response.num_tokens,
            lease_s=response.lease_s,
        )
        if response.token is not None and self._terms:
            self.first = decode_token(response.token)
        self._node.metrics.offered("unasked" if not self._terms else "none" if self.first is None else "given")
        with self._lock:
            if not self._is_withdrawn:
                if self._push is not None and response.num_pushed:
                    self._node.pushes.name(prefix.hold_id, self._push)
                self.prefix, self.is_done = prefix, True
                return True
        self._node.background_calls.release(prefix)
        return False

    def _receive(self, connection: PeerConnection, response: PrefillResponse, push: Push) -> None:
        """Take the blocks that are sent along."""
        if not response.num_pushed:
            push.close()
            return
        push.begin(response.num_pushed, connection.cut)
        start_s, timeout_s = time.monotonic(), self._node.config.pull_timeout_s
        connection.receive_pushed(response.num_pushed, push, timeout_s=timeout_s)
        num_bytes = response.num_pushed * self._node.block_bytes
        self._node.metrics.pushed("received", num_bytes=num_bytes)
        self._node.cost.loaded(num_bytes=num_bytes, seconds=time.monotonic() - start_s)

    def _message(self) -> PrefillRequest:
        """Return what the engine is told; a long prompt takes milliseconds, which are this thread's."""
        request = self._request
        return PrefillRequest(
            tokens=np.array(request.prompt_token_ids, "<i4").tobytes(),
            tenant=request.tenant,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            timeout_s=self._timeout_s,
            priority=request.priority,
            weight=request.weight,
            terms=self._terms,
            push_bytes=0 if self._push is None else self._push.num_bytes,
            num_skipped=self._num_skipped,
        )
