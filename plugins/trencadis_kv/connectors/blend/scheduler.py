"""Scheduler side of ``blend``: splits prompts into chunks to be saved, and finds chunks in prompts of requests that opted in."""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import attrs

from trencadis.interfaces import KVSchedulerSide, Lookup, SupportsHandover, SupportsMetrics, SupportsStepTimes
from trencadis.records import ConnectorReport, KVLayout, Request, TransferCause
from trencadis_kv.connectors.blend.chunks import WantedChunks
from trencadis_kv.connectors.blend.index import ChunkIndex, Tenant
from trencadis_kv.connectors.blend.lookups import BlendLookups, PromptScan
from trencadis_kv.connectors.blend.messages import AssembleOrder, BlendOrders, BlendShared, ChunkPlace, encode_orders
from trencadis_kv.connectors.blend.prompt import FoundPart, blend_ratio_of, wants_blend
from trencadis_kv.interfaces import LoadView
from trencadis_kv.store.bounded import BoundedDict

__all__ = ["BlendScheduler", "BlendShare"]

_FIRST_LAYERS = 1.4
"""Layers that all tokens pass through: the first, and the part of the second before its attention, which is the share
of the projections to queries, keys and values in the products of a Llama layer, rounded up."""
_WEIGHT = 0.3
_LEAST, _MOST = 0.1, 10.0


class BlendShare:
    """Corrects its prediction of blending time from measurements. One thread.

    Args:
        num_layers: Number of layers of the model.
    """

    def __init__(self, *, num_layers: int) -> None:
        self._floor = min(1.0, _FIRST_LAYERS / num_layers)
        self._factor = 1.0

    def of(self, share: float) -> float:
        """Return blending time as a share of the time that computing the tokens takes. Pure.

        Args:
            share: Share of the tokens that pass through all layers, 0 .. 1.
        """
        return self._factor * (self._floor + (1.0 - self._floor) * share)

    def took(self, *, predicted_s: float, seconds: float) -> None:
        """Update from a prediction of :meth:`of` and its measured time; a prediction of 0 is ignored."""
        if not seconds > 0.0 or not predicted_s > 0.0 or math.isinf(predicted_s):
            return
        found = self._factor * seconds / predicted_s
        self._factor = min(_MOST, max(_LEAST, (1.0 - _WEIGHT) * self._factor + _WEIGHT * found))


logger = logging.getLogger("trencadis.kv")

_MAX_PLANS = 4096
_READ_BYTES = 64 << 20
"""Bytes per call of the store that the prediction assumes: about the size of the largest chunk."""
_MAX_NEWS, _CHUNK_NEWS = 1024, 48
"""Most blocks of stored and lost chunks processed per call, and what a chunk counts besides; a look-up processes a quarter."""
_MAX_FORGOTTEN = 128
"""Most chunks removed from the index per call."""
_MESSAGE_PARTS = 16384
"""Most blocks and chunks of the assemblies in one message; a larger assembly is sent alone."""


@attrs.frozen(kw_only=True, eq=False)
class _Plan:
    """Plan of a blended prompt.

    Attributes:
        scan: Scan of the prompt.
        num_exact: Leading tokens whose KV the engine has.
        part: Chunks found after these tokens.
        ratio: Fraction of the chunks' tokens to recompute, 0 .. 1.
        predicted_s: Predicted blending time, seconds; nan: nothing was measured yet.
    """

    scan: PromptScan
    num_exact: int
    part: FoundPart
    ratio: float
    predicted_s: float = math.nan


class BlendScheduler(KVSchedulerSide, SupportsHandover, SupportsStepTimes, SupportsMetrics):
    """Finds chunks and decides whether to blend.

    Args:
        shared: State shared by both sides of the connector.
        index: Index of stored chunks.
        encode: Returns the tokens of a text; may take a while.
    """

    def __init__(self, shared: BlendShared, index: ChunkIndex, *, encode: Callable[[str], Sequence[int]]) -> None:
        self._shared = shared
        self._index = index
        self._encode = encode
        self._wanted: WantedChunks | None = None
        self._lookups: BlendLookups | None = None
        self._block_size = 1
        self._share = BlendShare(num_layers=1)
        self._transfer_ids = itertools.count()
        self._plans: BoundedDict[int, _Plan] = BoundedDict(_MAX_PLANS)
        self._filling: dict[int, _Plan] = {}
        self._doomed: deque[tuple[Tenant, Iterator[ChunkPlace]]] = deque()
        self._orders = BlendOrders(saves=[], assemblies=[], cancels=[])

    def on_ready(self, layout: KVLayout) -> None:
        """Receive the block size, and tokenize the separator."""
        config = self._shared.config
        self._block_size = layout.block_size
        self._share = BlendShare(num_layers=max(1, len({part.layer for part in layout.parts})))
        self._wanted = WantedChunks(
            block_size=layout.block_size,
            chunk_tokens=config.chunk_tokens,
            min_tokens=config.min_chunk_tokens,
            separator=self._encode(config.separator) if config.separator else (),
        )
        self._lookups = BlendLookups(
            self._index, self._wanted, block_size=layout.block_size, num_first_tokens=config.num_first_tokens
        )

    def lookup(self, request: Request, *, block_hashes: Sequence[bytes], num_local_tokens: int) -> Lookup:
        """Register the prompt's chunks for saving, and find saved ones if the request opted in; pending until complete."""
        self._take_news(_MAX_NEWS // 4)
        lookups, asks = self._lookups, wants_blend(request.transfer_params)
        if lookups is None or not self._shared.token_bytes or not (asks or self._shared.config.saves == "all"):
            return Lookup()
        ratio = self._ratio(request) if asks else None
        if ratio is None:
            lookups.register(request, block_hashes)
            return Lookup()
        scan = lookups.scan(request, block_hashes)
        return Lookup(pending=True) if scan is None else self._answer(request, scan, num_local_tokens, ratio)

    def on_allocated(self, transfer_id: int, *, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Order the blocks to be filled; those of the local hit come first."""
        if not blocks:
            return
        plan = self._filling[transfer_id] = self._plans.pop(transfer_id)
        token_bytes = plan.scan.tokens.array[: plan.part.end].astype("<i4").tobytes()
        self._orders.assemblies.append(
            AssembleOrder(transfer_id, token_bytes, plan.num_exact, list(blocks), list(plan.part.places), plan.ratio)
        )

    def on_unused(self, transfer_id: int) -> None:
        """Drop the plan, but keep the scan: an engine without room looks up again."""
        plan = self._plans.pop(transfer_id, None)
        if plan is not None and self._lookups is not None:
            self._lookups.keep(plan.scan)

    def on_abandoned(self, request: Request) -> None:
        """Drop the request's look-up."""
        if self._lookups is not None:
            self._lookups.forget(request.request_id)

    def on_computed(self, *, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Order saves of blocks that belong to registered chunks."""
        if self._wanted is not None:
            self._orders.saves.extend(self._wanted.computed(blocks, block_hashes))

    def on_finished(self, request: Request, *, blocks: Sequence[int]) -> int | None:
        """Pin no blocks: those to be saved were copied."""
        if self._lookups is not None:
            self._lookups.forget(request.request_id)
        return None

    def on_cancelled(self, transfer_id: int) -> None:
        """Cancel an assembly, which may not have been ordered yet."""
        self._orders.assemblies[:] = [
            assembly for assembly in self._orders.assemblies if assembly.transfer_id != transfer_id
        ]
        self._orders.cancels.append(transfer_id)
        if self._filling.pop(transfer_id, None) is not None:
            self._shared.counters.failed(TransferCause.CANCELLED)

    def take_message(self) -> bytes:
        """Return the orders, and register chunks of prompts. Assemblies can wait for the next message, saves cannot."""
        self._take_news(_MAX_NEWS)
        self._learn()
        orders, count = self._orders, self._num_fills()
        self._orders = BlendOrders(saves=[], assemblies=orders.assemblies[count:], cancels=[])
        return encode_orders(
            BlendOrders(saves=orders.saves, assemblies=orders.assemblies[:count], cancels=orders.cancels)
        )

    def on_report(self, report: ConnectorReport) -> None:
        """Update the prediction of blending time, and remove chunks that could not be read."""
        self._take_news(_MAX_NEWS)
        for transfer_id in report.loaded:
            self._filling.pop(transfer_id, None)
        for failed in report.failed:
            plan = self._filling.pop(failed.transfer_id, None)
            if plan is not None and failed.cause != TransferCause.RAISED:
                self._doomed.append((plan.scan.tenant, iter(plan.part.places)))
        self._forget()

    def on_step(self, *, num_tokens: int, device_s: float) -> None:
        """Update the prediction of computing time, and register chunks of prompts."""
        self._shared.cost.computed(num_tokens=num_tokens, seconds=device_s)
        self._learn()

    def metrics(self) -> str:
        """Return the counts."""
        return self._shared.counters.text()

    def _take_news(self, limit: int) -> None:
        shared, wanted = self._shared, self._wanted
        while shared.blended:
            transfer_id, seconds = shared.blended.popleft()
            plan = self._filling.get(transfer_id)
            if plan is not None:
                self._share.took(predicted_s=plan.predicted_s, seconds=seconds)
        while wanted is not None and limit > 0 and (shared.kept or shared.lost):
            is_kept = bool(shared.kept)
            chunk = wanted.take((shared.kept if is_kept else shared.lost).popleft())
            limit -= _CHUNK_NEWS
            if chunk is not None:
                limit -= len(chunk.hashes)
            if chunk is not None and is_kept:
                self._index.add(chunk.tenant, chunk.key, chunk.token_ids)
        self._forget()

    def _forget(self) -> None:
        budget = _MAX_FORGOTTEN
        while self._doomed and budget > 0:
            tenant, places = self._doomed[0]
            for place in itertools.islice(places, budget):
                self._index.forget(tenant, place.key)
                budget -= 1
            if budget > 0:
                self._doomed.popleft()

    def _learn(self) -> None:
        if self._lookups is not None:
            self._lookups.advance()

    def _num_fills(self) -> int:
        """Return how many assemblies the next message has, at least one."""
        parts = itertools.accumulate(
            len(assembly.blocks) + len(assembly.chunks) for assembly in self._orders.assemblies
        )
        return max(1, sum(1 for _ in itertools.takewhile(lambda total: total <= _MESSAGE_PARTS, parts)))

    def _ratio(self, request: Request) -> float | None:
        """Return the share of tokens to recompute; None, to compute the whole prompt, if it is invalid or 1."""
        ratio = blend_ratio_of(request.transfer_params, self._shared.config.ratio)
        if ratio is None:
            logger.info("Request %s: blend_ratio is no number from 0 to 1; it is computed.", request.request_id)
        if ratio is None or ratio == 1.0:
            self._shared.counters.looked_up("declined")
            return None
        return ratio

    def _answer(self, request: Request, scan: PromptScan, num_local_tokens: int, ratio: float) -> Lookup:
        shared = self._shared
        plan = self._plan(scan, num_local_tokens, ratio)
        if plan is None:
            shared.counters.looked_up("miss")
            return Lookup()
        plan, view = self._predicted(request, plan)
        wait_s = shared.policy.admits_load(view)
        if wait_s <= 0.0:
            shared.counters.looked_up("declined")
            return Lookup()
        shared.counters.looked_up("hit")
        transfer_id = next(self._transfer_ids)
        self._plans[transfer_id] = plan
        return Lookup(num_tokens=plan.part.end, transfer_id=transfer_id, timeout_s=wait_s, approximate=True)

    def _plan(self, scan: PromptScan, num_exact: int, ratio: float) -> _Plan | None:
        """Return the plan for a prompt, up to the last full block that chunks reach; None if too few tokens are found."""
        config = self._shared.config
        part = scan.found.part(num_exact, block_size=self._block_size)
        if part is None:
            return None
        if part.num_tokens < max(config.min_chunk_tokens, config.min_found_ratio * (part.end - num_exact)):
            return None
        return _Plan(scan=scan, num_exact=num_exact, part=part, ratio=ratio)

    def _predicted(self, request: Request, plan: _Plan) -> tuple[_Plan, LoadView]:
        """Return the plan with its predicted time, and the view of it for the policy."""
        shared, num_tokens = self._shared, plan.part.end - plan.num_exact
        num_free = plan.part.num_late_tokens
        num_anew = num_tokens - num_free + plan.ratio * num_free
        num_bytes = plan.part.num_read_tokens * shared.token_bytes
        compute_s = shared.cost.compute_s(num_tokens)
        blend_s = compute_s * self._share.of(num_anew / num_tokens)
        read_s = shared.cost.load_s(num_bytes, call_bytes=_READ_BYTES)
        view = LoadView(
            request=request,
            num_tokens=num_tokens,
            num_local_tokens=plan.num_exact,
            num_bytes=num_bytes,
            load_s=blend_s + (0.0 if math.isnan(read_s) else read_s),
            compute_s=compute_s,
            timeout_s=shared.config.load_timeout_s,
        )
        return attrs.evolve(plan, predicted_s=blend_s), view
