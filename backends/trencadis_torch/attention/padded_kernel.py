"""Attention of padded passes by the CPU's own kernel: shapes follow from batch size and query length, blocks are read where they lie.

How many blocks a pass reads is no shape here: buckets that differ in nothing else are one graph.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from trencadis.errors import StepFailedError
from trencadis.records import Bucket
from trencadis_torch.cache.kv_cache import PagedKVCache
from trencadis_torch.graphs.operators import kernel_attention

__all__ = ["PaddedKernelPass"]


class PaddedKernelPass:
    """A prefill or decode pass in a bucket. Made per pass, read by every layer.

    Args:
        cache: Written to; has a kernel.
        tables: Block tables of all rows, int32 ``[num_rows, max_blocks]``.
        slots: Where new keys go, int64 ``[B × Q]``.
        facts: Row, context length and queries of each sequence, int64 ``[3, B]``; padding has no queries.
        bucket: The shape.

    Raises:
        StepFailedError: The bucket is too small: the kernel would read what is not there.

    Attributes:
        signature: What the shapes follow from.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        *,
        tables: torch.Tensor,
        slots: torch.Tensor,
        facts: npt.NDArray[np.int64],
        bucket: Bucket,
    ) -> None:
        if (facts[2] > bucket.query_len).any():
            raise StepFailedError(
                f"{bucket} has room for {bucket.query_len} tokens of a sequence; one brings {facts[2].max()}.",
                hint="A bucketing strategy must return a bucket that covers the pass.",
            )
        self.signature = ("kernel", bucket.batch_size, bucket.query_len)
        self._cache = cache
        self._tables = tables
        self._slots = slots.contiguous()
        self._windows = {layer.index: layer.window for layer in cache.layers}
        sequences = np.empty((4, bucket.batch_size), np.int32)
        sequences[:3] = facts
        sequences[3] = np.arange(bucket.batch_size) * bucket.query_len
        self._sequences = torch.from_numpy(sequences)

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Store new keys and values, and return attention outputs ``[B × Q, H, Dv]``; as in ``RaggedPass``."""
        cached_keys, cached_values = self._cache.layer(layer_index)
        return kernel_attention(
            query,
            keys,
            values,
            cached_keys,
            cached_values,
            self._tables,
            self._slots,
            self._sequences,
            self._windows[layer_index],
            scale,
            softcap,
            sinks,
        )
