"""KV cache of a Gaudi: two flat tensors of slots for each layer, with the padding block at the end.

In fp8, a cached number times the scale of its layer's keys or values is the original number.
Source: vllm-gaudi 091bbadd, extension/utils.py, VLLMFP8KVCache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import torch

from trencadis_gaudi.fp8.operations import from_fp8, to_fp8
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKVCache

__all__ = ["CacheScales", "FlatKVCache", "FlatLayer"]


@attrs.frozen(eq=False)
class CacheScales:
    """Scales of a layer's fp8 keys and values, as tensors of one element, since a Python number would need a graph for each value.

    Attributes:
        keys: Scale of the keys.
        values: Scale of the values.
        inverses: Inverse scales of keys and values.
        dtype: Number type in which the model computes.
    """

    keys: torch.Tensor
    values: torch.Tensor
    inverses: tuple[torch.Tensor, torch.Tensor]
    dtype: torch.dtype

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> CacheScales:
        """Return the scales with their inverses."""
        return cls(keys, values, (1 / keys, 1 / values), dtype)

    def to(self, device: torch.device) -> CacheScales:
        """Return a copy of the scales on a device."""
        keys, values, *inverses = (scale.to(device) for scale in (self.keys, self.values, *self.inverses))
        return CacheScales(keys, values, (inverses[0], inverses[1]), self.dtype)


@attrs.frozen(eq=False)
class FlatLayer:
    """Keys and values of one layer, held by its attention module, so that torch.compile makes one graph for all layers of a kind.

    If graphs used a layer index to find the tensors, each layer would need its own graph.

    Attributes:
        keys: Cached keys, ``[num_slots, num_kv_heads, key_dim]``.
        values: Cached values, ``[num_slots, num_kv_heads, value_dim]``.
        block_size: Tokens per block.
        window: Tokens that a query sees, itself included; 0: all.
        scales: Scales of fp8 keys and values; None: stored unscaled in the layer's type.
    """

    keys: torch.Tensor
    values: torch.Tensor
    block_size: int
    window: int
    scales: CacheScales | None = None

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new keys and values in place, as whole tensors.

        Args:
            slots: Slot of each new token, int64 ``[T]``.
            keys: New keys, ``[T, num_kv_heads, key_dim]``.
            values: New values, ``[T, num_kv_heads, value_dim]``.
        """
        if self.scales is not None:
            for_keys, for_values = self.scales.inverses
            keys, values = to_fp8(keys, for_keys), to_fp8(values, for_values)
        self.keys.index_copy_(0, slots, keys)
        self.values.index_copy_(0, slots, values)

    def gather(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of blocks, each ``[n, block_size, num_kv_heads, head_dim]``.

        Args:
            blocks: Block ids, int64 ``[n]``.
        """
        return self._read(lambda part: part.index_select(0, blocks))

    def first(self, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of the first blocks in the form of :meth:`gather`; copied only if they are fp8."""
        return self._read(lambda part: part.narrow(0, 0, num_blocks))

    def _read(self, select: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (select(torch.unflatten(flat, 0, (-1, self.block_size))) for flat in (self.keys, self.values))
        if self.scales is None:
            return keys, values
        dtype = self.scales.dtype
        return from_fp8(keys, self.scales.keys, dtype), from_fp8(values, self.scales.values, dtype)


class FlatKVCache(PagedKVCache):
    """Keys and values by slot, written as whole tensors, since a captured graph must not write through a view.

    ``keys`` and ``values`` are views of the same memory by block, ``[num_blocks + 1, block_size, num_kv_heads, head_dim]``.

    Connectors read and write it through ``pool.py``.

    Args:
        layers: Attention layers of the model.
        num_blocks: Number of usable blocks; block ``num_blocks`` is the padding block.
        block_size: Tokens per block.
        device: Device of the tensors.
        scales: Scales of fp8 layers, by layer index; None: no layer is fp8.

    Raises:
        OutOfMemoryError: No room.

    Source: layout of vllm-gaudi, v1/worker/hpu_model_runner.py, initialize_kv_cache; graph limits of the vendor's documentation.
    """

    kernels = "gaudi"

    def __init__(
        self,
        layers: tuple[AttentionLayer, ...],
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        scales: Mapping[int, CacheScales] | None = None,
    ) -> None:
        self._flat: list[torch.Tensor] = []
        self._scales = {index: part.to(device) for index, part in (scales or {}).items()}
        super().__init__(layers, num_blocks=num_blocks, block_size=block_size, device=device)

    def _empty(self, part: int, layer: AttentionLayer, head_dim: int) -> torch.Tensor:
        num_slots = (self.num_blocks + 1) * self.block_size
        flat = torch.zeros(num_slots, layer.num_kv_heads, head_dim, dtype=layer.dtype, device=self.device)
        self._flat.append(flat)
        return torch.unflatten(flat, 0, (-1, self.block_size))

    def flat_layer(self, layer_index: int) -> FlatLayer:
        """Return keys and values of the layer with an index (``layer_idx`` of its module)."""
        at = self._at[layer_index]
        return FlatLayer(
            self._flat[at],
            self._flat[len(self.layers) + at],
            self.block_size,
            self.layers[at].window,
            self._scales.get(layer_index),
        )

    def write(self, layer_index: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new keys and values in place; as in the base class."""
        self.flat_layer(layer_index).write(slots, keys, values)

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy blocks in place, all layers; every source is read before any target is written.

        Args:
            sources: Block ids to read, int64 ``[n]``.
            targets: Block ids to write, int64 ``[n]``, distinct except for the padding block.
        """
        sources, targets = self._slots(sources), self._slots(targets)
        for cache in self._flat:
            cache.index_copy_(0, targets, cache.index_select(0, sources))

    def gather(self, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return copies of some blocks; as in the base class."""
        slots = self._slots(blocks)
        return tuple(torch.unflatten(cache.index_select(0, slots), 0, (-1, self.block_size)) for cache in self._flat)

    def scatter(self, blocks: torch.Tensor, contents: tuple[torch.Tensor, ...]) -> None:
        """Write blocks in place; as in the base class."""
        slots = self._slots(blocks)
        for cache, content in zip(self._flat, contents, strict=True):
            cache.index_copy_(0, slots, content.flatten(0, 1))

    def _slots(self, blocks: torch.Tensor) -> torch.Tensor:
        offsets = torch.arange(self.block_size, device=self.device)
        return (blocks[:, None] * self.block_size + offsets).flatten()
