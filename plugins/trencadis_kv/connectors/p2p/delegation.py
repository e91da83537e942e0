"""Requests of this engine whose prompts other engines compute. Failures stay inside: the prompt is computed elsewhere or here.

ordinary request ─▶ policy ─┬─ here
                            └─ delegated ─┬─ response ─▶ pulled like any other prefix
                                          └─ refused, failed, slow ─▶ another engine, once ─▶ here
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import attrs

from trencadis.interfaces import KVPolicy, PrefillEngineView, PrefillView
from trencadis.records import FirstToken, Request, TransferCause
from trencadis_kv.connectors.p2p.delegated_prefill import DelegatedPrefill
from trencadis_kv.connectors.p2p.params import RemotePrefix
from trencadis_kv.connectors.p2p.prefill_pool import PrefillEngine
from trencadis_kv.store.bounded import BoundedDict

if TYPE_CHECKING:
    from trencadis_kv.connectors.p2p.node import Node

__all__ = ["Delegation", "Pending"]

_MAX_TRIES: Final = 2
_MAX_LOADING: Final = 4096
_AFFINE_BLOCKS: Final = 4
"""Prompts that agree in so many leading blocks count as beginning alike."""
_LEAST_WAIT_S: Final = 0.5
_PULL_BYTES: Final = 1 << 20


_GONE: Final = (TransferCause.UNREACHABLE, TransferCause.INCOMPATIBLE)


class Pending(enum.Enum):
    """The other engine has not answered yet."""

    PENDING = enum.auto()


@attrs.define(eq=False)
class _Delegated:
    prefill: DelegatedPrefill
    tried: set[str]
    has_failed: bool = False
    has_given_token: bool = False


class Delegation:
    """Decides where prompts are computed, and tracks those that are computed elsewhere. Engine thread.

    Args:
        node: What both sides share.
        policy: Chooses.
    """

    def __init__(self, node: Node, policy: KVPolicy) -> None:
        self._node = node
        self._policy = policy
        self._delegated: dict[str, _Delegated] = {}
        self._loading: BoundedDict[str, _Delegated] = BoundedDict(_MAX_LOADING)
        self._threads: ThreadPoolExecutor | None = None
        node.metrics.watch_away(lambda: len(self._delegated))

    def find(
        self, request: Request, *, block_hashes: Sequence[bytes], num_local_tokens: int
    ) -> RemotePrefix | Pending | None:
        """Return where another engine has computed a prompt; None: it is to be computed here."""
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
        """Return the first token that came with an offer; once, so that no other engine is asked for it either."""
        delegated = self._delegated.get(request_id)
        if delegated is None or delegated.has_given_token or delegated.prefill.first is None:
            return None
        delegated.has_given_token = True
        return delegated.prefill.first

    def loading(self, request_id: str) -> None:
        """Learn that what was found is being pulled."""
        delegated = self._delegated.pop(request_id, None)
        if delegated is not None:
            self._node.metrics.count_delegated("served")
            self._loading[request_id] = delegated

    def tries_again(self, request_id: str) -> bool:
        """Return whether another engine is asked, now that a pull has failed."""
        delegated = self._loading.pop(request_id, None)
        if delegated is None or len(delegated.tried) >= _MAX_TRIES or not self._candidates(delegated.tried):
            return False
        delegated.has_failed = True
        self._delegated[request_id] = delegated
        return True

    def forget(self, request_id: str) -> None:
        """Learn that a request has ended, or is not waiting for this any more."""
        self._loading.pop(request_id, None)
        delegated = self._delegated.pop(request_id, None)
        if delegated is None or delegated.has_failed:
            return
        self._node.metrics.count_delegated("served" if delegated.has_given_token else "withdrawn")
        delegated.prefill.withdraw()

    def close(self) -> None:
        """Withdraw all; may be called twice."""
        for request_id in list(self._delegated):
            self.forget(request_id)
        for delegated in self._loading.values():
            delegated.prefill.hang_up()
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
        # What is left of a block is computed here in any case.
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
        terms = node.terms.pack(request) if node.terms and wants_token else b""
        is_all = bool(terms) and request.params.max_tokens == 1  # the token alone is an answer
        prefill = DelegatedPrefill(
            engine,
            request,
            node,
            timeout_s=self._patience_s(view),
            terms=terms,
            push=None if is_all else node.pushes.open(block_hashes[num_local:], block_bytes=node.block_bytes),
            num_skipped=num_local,
        )
        delegated = _Delegated(prefill, tried | {engine.name}, has_given_token=not wants_token)
        self._delegated[request.request_id] = delegated
        if self._threads is None:  # as many again may still receive blocks of prompts that are back
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

    def _patience_s(self, view: PrefillView) -> float:
        """Return how long an offer is waited for: an engine that takes longer than the policy was told to bear is slow."""
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
    """Return how long it takes until the KV of a prompt is here, nan if the engine's rate is not known. Pure."""
    state = engine.state
    if state is None or state.tokens_per_s <= 0:
        return math.nan
    compute_s = (engine.num_waiting_tokens + num_tokens) / state.tokens_per_s
    return engine.rtt_s + compute_s + (0.0 if math.isnan(pull_s) else pull_s)
