"""Prefills delegated to other engines. A failure is handled here: the prompt is computed by another engine or by this one.

ordinary request ─▶ policy ─┬─ here
                            └─ delegated ─┬─ response ─▶ pulled like any other prefix
                                          └─ refused, failed, slow ─▶ another engine, once ─▶ here
"""

from __future__ import annotations

import enum
import logging
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import attrs
import numpy as np

from trencadis.errors import TransferError
from trencadis.records import FirstToken, Request, TransferCause
from trencadis_kv.connectors.p2p.params import RemotePrefix
from trencadis_kv.connectors.p2p.peer import PeerConnection
from trencadis_kv.connectors.p2p.peers import PrefillEngine
from trencadis_kv.connectors.p2p.streaming import Push
from trencadis_kv.interfaces import KVPolicy, PrefillEngineView, PrefillView
from trencadis_kv.store.bounded import BoundedDict
from trencadis_kv.wire.stream_messages import PrefillRequest, PrefillResponse, decode_token

if TYPE_CHECKING:
    from trencadis_kv.connectors.p2p.node import Node

__all__ = ["DelegatedPrefill", "Delegation", "Pending"]

logger = logging.getLogger("trencadis.kv.p2p")


class DelegatedPrefill:
    """One prefill delegated to one engine; :meth:`run` on a thread of its own, the rest from any.

    Args:
        engine: Prefill engine that computes the prompt.
        request: Request whose prompt is computed.
        node: State shared by both sides, after its start.
        timeout_s: Longest wait for the response, seconds.
        sampling: Packed sampling fingerprint; empty: no first token is requested.
        push: Receives pushed blocks; None: no push is requested.
        num_skipped: Leading blocks of the prompt that this engine already has.

    Attributes:
        engine: Prefill engine that computes the prompt.
        prefix: Location of the blocks; None before the response.
        first: First token; None if the response had none.
        error: Reason why there is no response; None otherwise.
        is_done: True once there is a response or an error, or the request was withdrawn.
    """

    def __init__(
        self,
        engine: PrefillEngine,
        request: Request,
        node: Node,
        *,
        timeout_s: float,
        sampling: bytes = b"",
        push: Push | None = None,
        num_skipped: int = 0,
    ) -> None:
        self.engine = engine
        self._node = node
        self._request = request
        self._timeout_s = timeout_s
        self._sampling = sampling
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
        """Send the request and wait; sets :attr:`is_done` in every case."""
        error: TransferError | None = None
        try:
            self._run()
        except TransferError as raised:
            error = raised
        except Exception as raised:
            logger.warning("A prefill failed unexpectedly.", exc_info=raised)
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
        """Withdraw the request: the other engine drops the prompt."""
        with self._lock:
            self._is_withdrawn = True
            if self._connection is not None:
                self._connection.cut()
        self.stop_waiting()
        if self.prefix is not None:
            self._node.pushes.take(self.prefix.hold_id)
            self._node.background_calls.release(self.prefix)

    def stop_waiting(self) -> None:
        """Stop waiting; the caller releases the response's hold."""
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
        """Use the response; False if the request is gone."""
        prefix = attrs.evolve(
            self.engine.prefix,
            engine=engine,
            hold_id=response.hold_id,
            num_tokens=response.num_tokens,
            lease_s=response.lease_s,
            num_cached_tokens=response.num_cached_tokens,
        )
        if response.token is not None and self._sampling:
            self.first = decode_token(response.token)
        self._node.metrics.count_response(
            "unasked" if not self._sampling else "none" if self.first is None else "given"
        )
        with self._lock:
            if not self._is_withdrawn:
                if self._push is not None and response.num_pushed:
                    self._node.pushes.name(prefix.hold_id, self._push)
                self.prefix, self.is_done = prefix, True
                return True
        self._node.background_calls.release(prefix)
        return False

    def _receive(self, connection: PeerConnection, response: PrefillResponse, push: Push) -> None:
        """Receive the pushed blocks."""
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
        """Return the prefill request; encoding a long prompt takes milliseconds."""
        request = self._request
        return PrefillRequest(
            tokens=np.array(request.prompt_token_ids, "<i4").tobytes(),
            tenant=request.tenant,
            cache_salt=request.cache_salt,
            timeout_s=self._timeout_s,
            priority=request.priority,
            weight=request.weight,
            sampling=self._sampling,
            push_bytes=0 if self._push is None else self._push.num_bytes,
            num_skipped=self._num_skipped,
        )


_MAX_TRIES: Final = 2
_MAX_LOADING: Final = 4096
_AFFINE_BLOCKS: Final = 4
"""Number of leading blocks that select the preferred engine: prompts that agree in them prefer the same one."""
_LEAST_WAIT_S: Final = 0.5
_PULL_BYTES: Final = 1 << 20


_GONE: Final = (TransferCause.UNREACHABLE, TransferCause.INCOMPATIBLE)


class Pending(enum.Enum):
    """Result for a delegated prefill that has no response yet."""

    PENDING = enum.auto()


@attrs.define(eq=False)
class _Delegated:
    prefill: DelegatedPrefill
    tried: set[str]
    has_failed: bool = False
    has_given_token: bool = False


class Delegation:
    """Decides where prompts are computed, and tracks delegated prefills. Engine thread.

    Args:
        node: State shared by both sides.
        policy: Chooses the engine.
    """

    def __init__(self, node: Node, policy: KVPolicy) -> None:
        self._node = node
        self._policy = policy
        self._delegated: dict[str, _Delegated] = {}
        self._loading: BoundedDict[str, _Delegated] = BoundedDict(_MAX_LOADING)
        self._threads: ThreadPoolExecutor | None = None
        node.metrics.watch_delegated(lambda: len(self._delegated))

    def find(
        self, request: Request, *, block_hashes: Sequence[bytes], num_local_tokens: int
    ) -> RemotePrefix | Pending | None:
        """Return the prefix that another engine computed for a prompt; None: compute it here."""
        if not self._node.prefill_pool.engines:
            return None
        delegated = self._delegated.get(request.request_id)
        if delegated is None:
            return self._begin(request, block_hashes, num_local_tokens, tried=set())
        prefill = delegated.prefill
        if not delegated.has_failed and not prefill.is_done:
            return Pending.PENDING
        if not delegated.has_failed and prefill.prefix is not None:
            return prefill.prefix
        del self._delegated[request.request_id]
        if not delegated.has_failed:
            self._failed(delegated)
        if len(delegated.tried) >= _MAX_TRIES:
            return None
        wants_token = not delegated.has_given_token
        return self._begin(request, block_hashes, num_local_tokens, tried=delegated.tried, wants_token=wants_token)

    def take_token(self, request_id: str) -> FirstToken | None:
        """Return the first token of a prefill response, once."""
        delegated = self._delegated.get(request_id)
        if delegated is None or delegated.has_given_token or delegated.prefill.first is None:
            return None
        delegated.has_given_token = True
        return delegated.prefill.first

    def loading(self, request_id: str) -> None:
        """Record that the prefix is being pulled."""
        delegated = self._delegated.pop(request_id, None)
        if delegated is not None:
            self._node.metrics.count_delegated("served")
            self._loading[request_id] = delegated

    def can_retry(self, request_id: str) -> bool:
        """Return whether to delegate again after a failed pull."""
        delegated = self._loading.pop(request_id, None)
        if delegated is None or len(delegated.tried) >= _MAX_TRIES or not self._candidates(delegated.tried):
            return False
        delegated.has_failed = True
        self._delegated[request_id] = delegated
        return True

    def forget(self, request_id: str) -> None:
        """Remove a request that has ended or does not wait any more."""
        self._loading.pop(request_id, None)
        delegated = self._delegated.pop(request_id, None)
        if delegated is None or delegated.has_failed:
            return
        self._node.metrics.count_delegated("served" if delegated.has_given_token else "withdrawn")
        delegated.prefill.withdraw()

    def close(self) -> None:
        """Withdraw all delegated prefills; may be called twice."""
        for request_id in list(self._delegated):
            self.forget(request_id)
        for delegated in self._loading.values():
            delegated.prefill.stop_waiting()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def _candidates(self, tried: set[str]) -> list[PrefillEngine]:
        return [engine for engine in self._node.prefill_pool.ready() if engine.name not in tried]

    def _begin(
        self,
        request: Request,
        block_hashes: Sequence[bytes],
        num_local_tokens: int,
        *,
        tried: set[str],
        wants_token: bool = True,
    ) -> Pending | None:
        node = self._node
        engines = self._candidates(tried)
        num_tokens = len(request.prompt_token_ids) - num_local_tokens
        # A partial last block is always computed here.
        if node.identity is None or not engines or len(block_hashes) * node.block_size <= num_local_tokens:
            return None
        view = self._view(request, block_hashes, num_tokens, engines)
        index = self._policy.prefill_at(view)
        if index is None or len(self._delegated) >= node.config.max_delegated_prefills:
            node.metrics.count_delegated("declined")
            return None
        engine = engines[index]
        engine.num_sent_tokens += num_tokens
        num_local = num_local_tokens // node.block_size
        sampling = node.fingerprint.pack(request) if node.fingerprint and wants_token else b""
        is_all = bool(sampling) and request.params.max_tokens == 1  # the first token completes the request
        prefill = DelegatedPrefill(
            engine,
            request,
            node,
            timeout_s=self._timeout_s(view),
            sampling=sampling,
            push=None if is_all else node.pushes.open(block_hashes[num_local:], block_bytes=node.block_bytes),
            num_skipped=num_local,
        )
        delegated = _Delegated(prefill, tried | {engine.name}, has_given_token=not wants_token)
        self._delegated[request.request_id] = delegated
        if self._threads is None:  # twice the limit: prefills that have a response may still receive pushed blocks
            self._threads = ThreadPoolExecutor(
                2 * node.config.max_delegated_prefills, thread_name_prefix="trencadis-p2p-delegate"
            )
        self._threads.submit(delegated.prefill.run)
        return Pending.PENDING

    def _view(
        self, request: Request, block_hashes: Sequence[bytes], num_tokens: int, engines: Sequence[PrefillEngine]
    ) -> PrefillView:
        node = self._node
        key = block_hashes[min(_AFFINE_BLOCKS, len(block_hashes)) - 1]
        num_bytes = num_tokens // node.block_size * node.block_bytes
        pull_s = node.cost.load_s(num_bytes, call_bytes=_PULL_BYTES)
        return PrefillView(
            request=request,
            num_tokens=num_tokens,
            min_tokens=node.config.min_remote_tokens,
            max_slowdown=node.config.max_slowdown,
            compute_s=node.cost.compute_s(num_tokens),
            engines=[
                PrefillEngineView(
                    name=engine.name,
                    num_waiting_tokens=engine.num_waiting_tokens,
                    remote_s=_remote_s(engine, num_tokens, pull_s),
                    affinity=engine.affinity(key),
                )
                for engine in engines
            ],
        )

    def _timeout_s(self, view: PrefillView) -> float:
        """Return the timeout for a prefill response: longer than the policy's limit counts as slow."""
        longest_s = self._node.config.prefill_timeout_s
        if math.isnan(view.compute_s):
            return longest_s
        return min(longest_s, max(_LEAST_WAIT_S, view.max_slowdown * view.compute_s))

    def _failed(self, delegated: _Delegated) -> None:
        error = delegated.prefill.error
        if error is None:
            return
        self._node.metrics.count_delegated("failed")
        self._node.metrics.failed(error.cause)
        if error.cause in _GONE:
            delegated.prefill.engine.lost(error)


def _remote_s(engine: PrefillEngine, num_tokens: int, pull_s: float) -> float:
    """Return the predicted time until the KV of a prompt is here; nan if the engine's rate is unknown. Pure."""
    state = engine.state
    if state is None or state.tokens_per_s <= 0:
        return math.nan
    compute_s = (engine.num_waiting_tokens + num_tokens) / state.tokens_per_s
    return engine.rtt_s + compute_s + (0.0 if math.isnan(pull_s) else pull_s)
