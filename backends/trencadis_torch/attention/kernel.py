"""The interface of a pass to attention layers, and that of kernels that attend over the paged cache in place, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from trencadis.records import Int32Array
from trencadis_torch.attention.options import AttentionOptions

if TYPE_CHECKING:
    from trencadis_torch.cache.kv_cache import PagedKVCache

__all__ = ["AttentionPass", "KernelPass", "PagedKernel", "StaticKernel"]


class AttentionPass(Protocol):
    """The interface that every attention layer of a model calls during a pass."""

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Store new keys and values, and return attention outputs ``[T, H, Dv]``."""
        ...


class KernelPass(Protocol):
    """The calls of one pass, one for each layer."""

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        output: torch.Tensor,
        options: AttentionOptions,
    ) -> None:
        """Store new keys and values of all tokens, and write attention outputs of the sequences that attend.

        Args:
            layer_index: The module's ``layer_idx``.
            query: ``[T, H, D]``.
            keys: ``[T, KV, D]``.
            values: ``[T, KV, Dv]``.
            output: Written to, ``[T, H, Dv]``, contiguous, the dtype of ``query``.
            options: Of the layer.
        """
        ...


class PagedKernel(Protocol):
    """A kernel.

    Attributes:
        name: Whose low bits the cache's content has.
    """

    @property
    def name(self) -> str:  # noqa: D102 - above
        ...

    def begin(
        self,
        cache: PagedKVCache,
        *,
        tables: torch.Tensor,
        slots: torch.Tensor,
        rows: Int32Array,
        starts: Int32Array,
        query_lens: Int32Array,
        firsts: Int32Array,
    ) -> KernelPass:
        """Return the calls of one pass.

        Args:
            cache: Read and written.
            tables: Block tables of all rows, int32 ``[num_rows, max_blocks]``.
            slots: Where new keys go, of all tokens of the pass, int64 ``[T]``.
            rows: Row of each sequence that attends.
            starts: First query position of each.
            query_lens: Queries of each.
            firsts: Token of the pass with each one's first query.
        """
        ...


@runtime_checkable
class StaticKernel(PagedKernel, Protocol):
    """A kernel whose passes can be made from tensors on the device alone."""

    def begin_static(
        self,
        cache: PagedKVCache,
        *,
        tables: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor,
        starts: torch.Tensor,
        query_lens: torch.Tensor,
        query_len: int,
    ) -> KernelPass:
        """Return the calls of a padded pass; every shape follows from the arguments'.

        Args:
            cache: Read and written.
            tables: Block tables of all rows, int32 ``[num_rows, max_blocks]``.
            slots: Where new keys go, of all tokens of the bucket, int64 ``[B × query_len]``.
            rows: int64 ``[B]``; of padding any.
            starts: int64 ``[B]``.
            query_lens: int64 ``[B]``; 0 of padding, which attends to nothing.
            query_len: The bucket's; each sequence has as many tokens.
        """
        ...
