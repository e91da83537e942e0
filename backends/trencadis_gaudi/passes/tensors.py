"""Passes in two parts: tensors made on the host outside of a graph, and attention made from them inside a captured graph.

    Pass ─ inputs() ─▶ token ids, positions, tensors ──┤ border of the graph ├──▶ attention() ─▶ the model's layers

Only tensors cross the border, in tuples, since the vendor's graphs are identified by the shapes of tensors and by the hash of anything
else, so that any other object would need a graph for each of its values.

Shapes: T tokens of the bucket.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from trencadis.records import Int32Array, Int64Array, Pass, Phase, UnifiedBucket
from trencadis_gaudi.attention.adapter import LayerPass, attach
from trencadis_gaudi.attention.fused_sdpa import FusedSDPA
from trencadis_gaudi.flat_cache import FlatKVCache
from trencadis_gaudi.passes.block_lists import query_positions
from trencadis_gaudi.passes.decode import DecodeTensors, GaudiDecode, decode_tensors
from trencadis_gaudi.passes.flat_tokens import flat_tokens
from trencadis_gaudi.passes.merged import GaudiMergedPrefill, MergedTensors, merged_tensors
from trencadis_gaudi.passes.prefill import GaudiPrefill, PrefillTensors, prefill_tensors
from trencadis_gaudi.passes.unified import GaudiUnified, UnifiedTensors, unified_batch, unified_tensors
from trencadis_torch.device import to_device
from trencadis_torch.rows import Rows

__all__ = ["GaudiPasses", "PassInputs", "PassTensors"]

PassTensors = DecodeTensors | PrefillTensors | MergedTensors | UnifiedTensors


@attrs.frozen(kw_only=True)
class PassInputs:
    """Inputs of one forward, made outside of its graph.

    Attributes:
        token_ids: Token ids, int64 ``[1, T]``; 0 in padding.
        positions: Positions, int64 ``[1, T]``; 0 in padding.
        tensors: Tensors from which the graph makes the attention.
        firsts: Index of each sequence's first token among the T, int64 ``[n]``, on the host.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    tensors: PassTensors
    firsts: npt.NDArray[np.int64]


class GaudiPasses:
    """Makes inputs and attention of the passes of one engine.

    Args:
        cache: Cache of keys and values.
        contiguous: Whether decode passes read the cache by range; requires the engine's prefix cache to be off.
        merged_prefill: Whether a prefill pass has its prompts in one row, and its bucket counts them together.
        kernel: Fused attention kernel for prefills; None: plain operations.
    """

    def __init__(
        self,
        cache: FlatKVCache,
        *,
        contiguous: bool,
        merged_prefill: bool = False,
        kernel: FusedSDPA | None = None,
    ) -> None:
        self._cache = cache
        self._contiguous = contiguous
        self._merged = merged_prefill
        self._kernel = kernel

    def attach(self, model: Any) -> None:
        """Give the attention modules of a model their layers of the cache."""
        attach(model, self._cache)

    def inputs(self, one: Pass, rows: Rows, tables: Int32Array) -> PassInputs:
        """Return the inputs of a pass of any kind; reads the rows' tokens on the device.

        Args:
            one: Prefill, decode or unified pass.
            rows: Rows with their tokens on the device.
            tables: Block tables of all rows on the host, int32 ``[num_rows, num_columns]``.

        Raises:
            StepFailedError: The bucket is too small for the pass.
        """
        if isinstance(one.bucket, UnifiedBucket):
            batch = unified_batch(one, tables, block_size=self._cache.block_size)
            unified = unified_tensors(one, batch, tables, self._cache, bucket=one.bucket)
            return self._row(one, rows, tables, one.bucket.query_len, unified)
        if one.bucket.phase is Phase.DECODE:
            decode = decode_tensors(one, tables, self._cache, contiguous=self._contiguous)
            return self._rectangle(one, rows, decode)
        if self._merged:
            merged = merged_tensors(one, tables, self._cache)
            return self._row(one, rows, tables, one.bucket.query_len, merged)
        return self._rectangle(one, rows, prefill_tensors(one, tables, self._cache))

    def attention(self, tensors: PassTensors) -> LayerPass:
        """Return the attention of a pass, inside its graph."""
        match tensors:
            case DecodeTensors():
                return GaudiDecode(self._cache, tensors, contiguous=self._contiguous)
            case PrefillTensors():
                return GaudiPrefill(self._cache, tensors, kernel=self._kernel)
            case MergedTensors():
                return GaudiMergedPrefill(self._cache, tensors, kernel=self._kernel)
            case UnifiedTensors():
                return GaudiUnified(self._cache, tensors)

    def _rectangle(self, one: Pass, rows: Rows, tensors: PassTensors) -> PassInputs:
        """Return the inputs of a rectangular pass: the tokens of each sequence followed by its padding."""
        bucket = one.bucket
        places = np.zeros((2, bucket.batch_size, bucket.query_len), np.int64)
        places[0] = -1
        real = np.arange(bucket.query_len) < one.query_lens[:, None]
        positions = query_positions(one.starts, one.query_lens, query_len=bucket.query_len)
        places[0, : len(one.rows)] = np.where(real, one.rows[:, None], -1)
        places[1, : len(one.rows)] = np.where(real, positions, 0)
        firsts = np.arange(bucket.batch_size, dtype=np.int64) * bucket.query_len
        return self._inputs(rows, places.reshape(2, -1), tensors, firsts)

    def _row(self, one: Pass, rows: Rows, tables: Int32Array, num_tokens: int, tensors: PassTensors) -> PassInputs:
        """Return the inputs of a pass of one row: the tokens of all sequences followed by padding."""
        tokens = flat_tokens(one, tables, self._cache, num_tokens=num_tokens)
        # Entry -1 is for padding.
        places = np.stack([np.append(one.rows, -1)[tokens.groups], tokens.positions]).astype(np.int64)
        return self._inputs(rows, places, tensors, tokens.firsts)

    def _inputs(self, rows: Rows, places: Int64Array, tensors: PassTensors, firsts: Int64Array) -> PassInputs:
        row, positions = to_device(places, rows.tokens.device)
        known = rows.tokens[row.clamp(min=0), positions]
        token_ids = torch.where(row < 0, 0, known).long()
        return PassInputs(token_ids=token_ids[None], positions=positions[None], tensors=tensors, firsts=firsts)
