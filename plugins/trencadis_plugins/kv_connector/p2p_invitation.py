"""One prompt on its way to an engine that computes it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import attrs
import numpy as np

from trencadis.errors import TransferError
from trencadis.kv.handshake import Identity
from trencadis.kv.stream_messages import Invite
from trencadis.records import Request, TransferCause
from trencadis_plugins.kv_connector.p2p_params import RemotePrefix
from trencadis_plugins.kv_connector.p2p_peer import PeerConnection
from trencadis_plugins.kv_connector.p2p_registry import PrefillEngine

__all__ = ["Invitation"]

logger = logging.getLogger("trencadis.kv.p2p")


class Invitation:
    """Asks one engine to compute one prompt; :meth:`run` on a thread of its own, the rest from any.

    Args:
        engine: Which.
        request: Whose prompt.
        me: This engine.
        timeout_s: The longest wait for the offer.
        connect_timeout_s: The longest that connecting and introducing takes.
        give_back: Releases blocks that were offered when nobody wanted them any more.

    Attributes:
        engine: As given.
        prefix: Where the blocks are, once they are offered.
        error: Why there are none.
        is_done: One of the two is set, or it was withdrawn.
    """

    def __init__(
        self,
        engine: PrefillEngine,
        request: Request,
        me: Identity,
        *,
        timeout_s: float,
        connect_timeout_s: float,
        give_back: Callable[[RemotePrefix], None],
    ) -> None:
        self.engine = engine
        self._give_back = give_back
        self._request = request
        self._timeout_s = timeout_s
        self._me = me
        self._connect_timeout_s = connect_timeout_s
        self._connection: PeerConnection | None = None
        self._lock = threading.Lock()
        self._is_withdrawn = False
        self.prefix: RemotePrefix | None = None
        self.error: TransferError | None = None
        self.is_done = False

    def run(self) -> None:
        """Ask, and wait; whatever happens, :attr:`is_done` says so."""
        try:
            self._run()
        except TransferError as error:
            self.error = error
        except Exception as error:
            logger.warning("An invitation failed unexpectedly.", exc_info=error)
            self.error = TransferError(f"{type(error).__name__}: {error}", cause=TransferCause.RAISED)
        finally:
            self.is_done = True

    def withdraw(self) -> None:
        """Want it no more: the other engine drops the prompt."""
        with self._lock:
            self._is_withdrawn = True
            if self._connection is not None:
                self._connection.cut()
        if self.prefix is not None:
            self._give_back(self.prefix)

    def _run(self) -> None:
        prefix = self.engine.prefix
        with PeerConnection(prefix, self._me, connect_timeout_s=self._connect_timeout_s) as connection:
            with self._lock:
                if self._is_withdrawn:
                    raise TransferError("The prompt is not wanted any more.", cause=TransferCause.CANCELLED)
                self._connection = connection
            offer = connection.invite(self._message())
            prefix = attrs.evolve(
                prefix,
                engine=connection.engine,
                ticket=offer.ticket,
                num_tokens=offer.num_tokens,
                lease_s=offer.lease_s,
            )
        with self._lock:
            if not self._is_withdrawn:
                self.prefix = prefix
                return
        self._give_back(prefix)

    def _message(self) -> Invite:
        """Return what the engine is told; a long prompt takes milliseconds, which are this thread's."""
        request = self._request
        return Invite(
            tokens=np.array(request.prompt_token_ids, "<i4").tobytes(),
            tenant=request.tenant,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            timeout_s=self._timeout_s,
            priority=request.priority,
            weight=request.weight,
        )
