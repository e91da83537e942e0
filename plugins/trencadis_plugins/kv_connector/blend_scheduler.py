"""The scheduler side of ``blend``: cuts prompts into chunks to be kept, and finds chunks in the prompts of those who ask."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence

import attrs
import numpy as np

from trencadis.interfaces import KVSchedulerSide, LoadView, Lookup
from trencadis.kv.bounded import BoundedDict
from trencadis.records import ConnectorReport, Int32Array, KVLayout, Request, TransferCause
from trencadis_plugins.kv_connector.blend_chunks import WantedChunks
from trencadis_plugins.kv_connector.blend_desk import BlendDesk
from trencadis_plugins.kv_connector.blend_index import ChunkIndex, ChunkMatch, Tenant, tenant_of
from trencadis_plugins.kv_connector.blend_messages import BlendOrders, ChunkPlace, FillOrder, encode_orders
from trencadis_plugins.kv_connector.blend_params import blend_ratio_of, wants_blend
from trencadis_plugins.kv_connector.blend_share import BlendShare

__all__ = ["BlendScheduler"]

logger = logging.getLogger("trencadis.kv")

_MAX_PLANS = 4096
_READ_BYTES = 64 << 20
"""Of one call of the store, for the prediction: a chunk is about as large as that at most."""


@attrs.frozen(kw_only=True, eq=False)
class _Plan:
    """A prompt that can be put together.

    Attributes:
        tenant: Whose.
        token_ids: Up to the last token that is filled.
        num_exact: Leading ones that the engine has.
        matches: Chunks behind them.
        ratio: Of the chunks' tokens, computed anew.
        predicted_s: What blending is to take; nan: nothing was measured yet.
    """

    tenant: Tenant
    token_ids: Int32Array
    num_exact: int
    matches: tuple[ChunkMatch, ...]
    ratio: float
    predicted_s: float = math.nan


class BlendScheduler(KVSchedulerSide):
    """Finds and decides.

    Args:
        desk: Of the connector.
        index: Of chunks that are kept.
        encode: Returns the tokens of a text; may take a while.
    """

    def __init__(self, desk: BlendDesk, index: ChunkIndex, *, encode: Callable[[str], Sequence[int]]) -> None:
        self._desk = desk
        self._index = index
        self._encode = encode
        self._wanted: WantedChunks | None = None
        self._block_size = 1
        self._share = BlendShare(num_layers=1)
        self._tickets = itertools.count()
        self._plans: BoundedDict[int, _Plan] = BoundedDict(_MAX_PLANS)
        self._filling: dict[int, _Plan] = {}
        self._orders = BlendOrders(keeps=[], fills=[], cancels=[])

    def on_ready(self, layout: KVLayout) -> None:
        """Learn the size of a block, and read the separator."""
        config = self._desk.config
        self._block_size = layout.block_size
        self._share = BlendShare(num_layers=max(1, len({part.layer for part in layout.parts})))
        self._wanted = WantedChunks(
            block_size=layout.block_size,
            chunk_tokens=config.chunk_tokens,
            min_tokens=config.min_chunk_tokens,
            separator=self._encode(config.separator) if config.separator else (),
        )

    def lookup(self, request: Request, *, block_hashes: Sequence[bytes], num_local_tokens: int) -> Lookup:
        """Want the prompt's chunks, and find those that are there if the request asks for it."""
        self._take_news()
        asks = wants_blend(request.transfer_params)
        if self._wanted is None or not self._desk.token_bytes or not (asks or self._desk.config.saves == "all"):
            return Lookup()
        token_ids = np.array(request.prompt_token_ids, np.int32)
        self._wanted.want(request, token_ids, block_hashes, is_kept=self._index.has)
        if not asks:
            return Lookup()
        return self._answer(request, token_ids[: len(block_hashes) * self._block_size], num_local_tokens)

    def on_allocated(self, ticket: int, *, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Order the blocks to be filled; those of the local hit come first among them."""
        if not blocks:
            return
        plan = self._filling[ticket] = self._plans.pop(ticket)
        places = [
            ChunkPlace(match.key, match.chunk_tokens, match.skip, match.position, match.num_tokens)
            for match in plan.matches
        ]
        token_bytes = plan.token_ids.astype("<i4").tobytes()
        self._orders.fills.append(FillOrder(ticket, token_bytes, plan.num_exact, list(blocks), places, plan.ratio))

    def on_unused(self, ticket: int) -> None:
        """Forget the plan."""
        self._plans.pop(ticket, None)

    def on_computed(self, *, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Order what belongs to chunks that are wanted."""
        if self._wanted is not None:
            self._orders.keeps.extend(self._wanted.computed(blocks, block_hashes))

    def on_finished(self, request: Request, *, blocks: Sequence[int]) -> int | None:
        """Hold nothing: what is to be kept was copied."""
        return None

    def on_cancelled(self, ticket: int) -> None:
        """Order the end of a fill, which may not have been ordered yet."""
        self._orders.fills[:] = [fill for fill in self._orders.fills if fill.ticket != ticket]
        self._orders.cancels.append(ticket)
        if self._filling.pop(ticket, None) is not None:
            self._desk.counters.failed(TransferCause.CANCELLED)

    def take_message(self) -> bytes:
        """Return the orders."""
        orders, self._orders = self._orders, BlendOrders(keeps=[], fills=[], cancels=[])
        return encode_orders(orders)

    def on_report(self, report: ConnectorReport) -> None:
        """Learn what blending takes, and forget chunks that could not be read: one of them is not there."""
        self._take_news()
        for ticket in report.loaded:
            self._filling.pop(ticket, None)
        for failed in report.failed:
            plan = self._filling.pop(failed.ticket, None)
            if plan is not None and failed.cause != TransferCause.RAISED:
                for match in plan.matches:
                    self._index.forget(plan.tenant, match.key)

    def on_step(self, *, num_tokens: int, device_s: float) -> None:
        """Learn what computing takes."""
        self._desk.cost.computed(num_tokens=num_tokens, seconds=device_s)

    def metrics(self) -> str:
        """Return the counts."""
        return self._desk.counters.text()

    def _take_news(self) -> None:
        desk, wanted = self._desk, self._wanted
        while wanted is not None and desk.kept:
            chunk = wanted.take(desk.kept.popleft())
            if chunk is not None:
                self._index.add(chunk.tenant, chunk.key, chunk.token_ids)
        while wanted is not None and desk.lost:
            wanted.take(desk.lost.popleft())
        while desk.blended:
            ticket, seconds = desk.blended.popleft()
            plan = self._filling.get(ticket)
            if plan is not None:
                self._share.took(predicted_s=plan.predicted_s, seconds=seconds)

    def _answer(self, request: Request, token_ids: Int32Array, num_local_tokens: int) -> Lookup:
        desk = self._desk
        ratio = blend_ratio_of(request.transfer_params, desk.config.ratio)
        if ratio is None:
            desk.counters.looked_up("declined")
            logger.info("Request %s: blend_ratio is no number from 0 to 1; it is computed.", request.request_id)
            return Lookup()
        plan = self._plan(request, token_ids, num_local_tokens, ratio)
        if plan is None:
            desk.counters.looked_up("miss")
            return Lookup()
        plan, view = self._predicted(request, plan)
        wait_s = desk.policy.admits_load(view)
        if wait_s <= 0.0:
            desk.counters.looked_up("declined")
            return Lookup()
        desk.counters.looked_up("hit")
        ticket = next(self._tickets)
        self._plans[ticket] = plan
        return Lookup(num_tokens=len(plan.token_ids), ticket=ticket, timeout_s=wait_s, approximate=True)

    def _plan(self, request: Request, token_ids: Int32Array, num_exact: int, ratio: float) -> _Plan | None:
        """Return how a prompt can be put together, up to the last full block that chunks reach; None if too little is there."""
        config, tenant = self._desk.config, tenant_of(request)
        matches = self._index.find(tenant, token_ids, first=num_exact)
        if not matches:
            return None
        end = (matches[-1].position + matches[-1].num_tokens) // self._block_size * self._block_size
        cut = [attrs.evolve(match, num_tokens=min(match.num_tokens, end - match.position)) for match in matches]
        cut = [match for match in cut if match.num_tokens > 0]
        num_found = sum(match.num_tokens for match in cut)
        if num_found < max(config.min_chunk_tokens, config.min_found_ratio * (end - num_exact)):
            return None
        return _Plan(tenant=tenant, token_ids=token_ids[:end], num_exact=num_exact, matches=tuple(cut), ratio=ratio)

    def _predicted(self, request: Request, plan: _Plan) -> tuple[_Plan, LoadView]:
        """Return the plan with what it is to take, and what the policy is asked."""
        desk, num_tokens = self._desk, len(plan.token_ids) - plan.num_exact
        first = desk.config.num_first_tokens
        num_free = sum(max(0, match.num_tokens - first) for match in plan.matches)
        num_anew = num_tokens - num_free + plan.ratio * num_free
        num_bytes = sum(match.chunk_tokens for match in plan.matches) * desk.token_bytes
        compute_s = desk.cost.compute_s(num_tokens)
        blend_s = compute_s * self._share.of(num_anew / num_tokens)
        read_s = desk.cost.load_s(num_bytes, call_bytes=_READ_BYTES)
        view = LoadView(
            request=request,
            num_tokens=num_tokens,
            num_local_tokens=plan.num_exact,
            num_bytes=num_bytes,
            load_s=blend_s + (0.0 if math.isnan(read_s) else read_s),
            compute_s=compute_s,
            timeout_s=desk.config.load_timeout_s,
        )
        return attrs.evolve(plan, predicted_s=blend_s), view
