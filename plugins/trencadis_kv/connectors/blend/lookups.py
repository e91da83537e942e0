"""Incremental look-ups of chunks: each call of the scheduler side scans a part of a prompt, within a time budget.

opted in to blending ─▶ chunks registered ─▶ chunks found ─▶ answered; pending until then
not opted in         ─▶ answered at once; its other chunks are registered with the next steps, before these compute them
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from trencadis.records import Request
from trencadis_kv.connectors.blend.chunks import WantedChunks
from trencadis_kv.connectors.blend.index import ChunkIndex, Tenant, tenant_of
from trencadis_kv.connectors.blend.prompt import FoundChunks, PromptTokens
from trencadis_kv.store.bounded import BoundedDict

__all__ = ["CALL_WORK", "BlendLookups", "PromptScan"]

CALL_WORK = 8192
"""Work per call, in tokens read, hashed or compared: about 20 ns each, a fifth of the millisecond that a call may take."""
_MAX_OPEN = 4096
_MAX_ANSWERED = 64


@attrs.define(kw_only=True, eq=False)
class PromptScan:
    """Scan of one prompt.

    Attributes:
        request_id: Id of the request.
        tenant: Tenant of the request.
        last_hash: Hash of the prompt's last full block, which identifies the prompt.
        tokens: Tokens of the prompt's full blocks.
        found: Chunks found in these tokens.
        work: Remaining work; yields the amount of each part, in tokens.
    """

    request_id: str
    tenant: Tenant
    last_hash: bytes
    tokens: PromptTokens
    found: FoundChunks
    work: Iterator[int]

    def advance(self, budget: int) -> int:
        """Continue until the work budget is used; returns the rest of the budget, above 0 if the scan is complete."""
        while budget > 0:
            done = next(self.work, None)
            if done is None:
                break
            budget -= done
        return budget

    def is_of(self, request: Request, last_hash: bytes, num_tokens: int) -> bool:
        """Whether the scan is of this request and prompt."""
        return (self.last_hash, len(self.tokens)) == (last_hash, num_tokens) and self.tenant == tenant_of(request)


class BlendLookups:
    """Scans of prompts. One thread.

    Args:
        index: Index of stored chunks.
        wanted: Chunks that are being computed.
        block_size: Tokens per block.
        num_first_tokens: First tokens of each chunk that are always recomputed; see :class:`FoundChunks`.
    """

    def __init__(self, index: ChunkIndex, wanted: WantedChunks, *, block_size: int, num_first_tokens: int) -> None:
        self._index = index
        self._wanted = wanted
        self._block_size = block_size
        self._num_first_tokens = num_first_tokens
        self._asked: BoundedDict[str, PromptScan] = BoundedDict(_MAX_OPEN)
        self._registering: BoundedDict[str, PromptScan] = BoundedDict(_MAX_OPEN)
        self._answered: BoundedDict[str, PromptScan] = BoundedDict(_MAX_ANSWERED)

    def __len__(self) -> int:
        return len(self._asked) + len(self._registering) + len(self._answered)

    def scan(self, request: Request, block_hashes: Sequence[bytes]) -> PromptScan | None:
        """Continue a request's scan; returns it when complete, else None.

        Args:
            request: Request whose prompt is scanned.
            block_hashes: Hashes of the prompt's full blocks.
        """
        scan = self._take_scan(request, block_hashes, (self._asked, self._answered), finds=True)
        if scan.advance(CALL_WORK) > 0:
            return scan
        self._asked[scan.request_id] = scan
        return None

    def register(self, request: Request, block_hashes: Sequence[bytes]) -> None:
        """Register the first chunks of a prompt, and the others in later calls of :meth:`advance`.

        Args:
            request: Request whose prompt is registered.
            block_hashes: Hashes of the prompt's full blocks.
        """
        scan = self._take_scan(request, block_hashes, (self._registering,), finds=False)
        if scan.advance(CALL_WORK) <= 0:
            self._registering[scan.request_id] = scan

    def advance(self) -> None:
        """Continue registering chunks of prompts, the oldest first."""
        budget = CALL_WORK
        while self._registering and budget > 0:
            request_id = next(iter(self._registering))
            budget = self._registering[request_id].advance(budget)
            if budget > 0:
                del self._registering[request_id]

    def keep(self, scan: PromptScan) -> None:
        """Keep a scan whose hit was not used: a full engine repeats the look-up at every step, and gets this answer at once."""
        self._answered[scan.request_id] = scan

    def forget(self, request_id: str) -> None:
        """Remove a request that will not be looked up again."""
        for scans in (self._asked, self._registering, self._answered):
            scans.pop(request_id, None)

    def _take_scan(
        self,
        request: Request,
        block_hashes: Sequence[bytes],
        known: Sequence[BoundedDict[str, PromptScan]],
        *,
        finds: bool,
    ) -> PromptScan:
        """Remove and return the request's scan, or return a new one."""
        last_hash, num_tokens = block_hashes[-1] if block_hashes else b"", len(block_hashes) * self._block_size
        scans = [scan for scans in known if (scan := scans.pop(request.request_id, None)) is not None]
        for scan in scans:
            if scan.is_of(request, last_hash, num_tokens):
                return scan
        tokens = PromptTokens(request.prompt_token_ids, num_tokens)
        found, tenant = FoundChunks(num_first_tokens=self._num_first_tokens), tenant_of(request)
        return PromptScan(
            request_id=request.request_id,
            tenant=tenant,
            last_hash=last_hash,
            tokens=tokens,
            found=found,
            work=self._work(tenant, tokens, tuple(block_hashes), found if finds else None),
        )

    def _work(
        self, tenant: Tenant, tokens: PromptTokens, block_hashes: tuple[bytes, ...], found: FoundChunks | None
    ) -> Iterator[int]:
        yield from self._wanted.want(tenant, tokens, block_hashes, is_kept=self._index.has)
        if found is not None:
            yield from self._index.search(tenant, tokens.array, found)
