"""The KV cache of a Gaudi: per layer two flat tensors of slots, the padding block last."""

from __future__ import annotations

import attrs
import torch

from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKVCache

__all__ = ["FlatKVCache", "FlatLayer"]


@attrs.frozen(eq=False)
class FlatLayer:
    """Keys and values of one layer, kept at its attention module: torch.compile makes one graph for all layers of a kind.

    A graph that finds its tensors by the layer's number would be a graph for each number.

    Attributes:
        keys: ``[num_slots, num_kv_heads, key_dim]``.
        values: ``[num_slots, num_kv_heads, value_dim]``.
        block_size: Tokens per block.
        window: A query sees this many tokens, itself included; 0 sees all.
    """

    keys: torch.Tensor
    values: torch.Tensor
    block_size: int
    window: int

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new keys and values in place, as whole tensors.

        Args:
            slots: int64 ``[T]``.
            keys: ``[T, num_kv_heads, key_dim]``.
            values: ``[T, num_kv_heads, value_dim]``.
        """
        self.keys.index_copy_(0, slots, keys)
        self.values.index_copy_(0, slots, values)

    def blocks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of keys and values by block, each ``[num_blocks + 1, block_size, num_kv_heads, head_dim]``."""
        return tuple(torch.unflatten(flat, 0, (-1, self.block_size)) for flat in (self.keys, self.values))  # type: ignore[return-value]


class FlatKVCache(PagedKVCache):
    """Keys and values by slot; written as whole tensors, for a captured graph must not write through a view.

    ``keys`` and ``values`` are views of the same memory by block, ``[num_blocks + 1, block_size, num_kv_heads, head_dim]``.

    A worker side copies blocks on the backend's thread only: what another thread gives to a lazy device is another graph.

    Args:
        layers: The attention layers.
        num_blocks: Usable blocks; block ``num_blocks`` is the padding block.
        block_size: Tokens per block.
        device: Where.

    Raises:
        OutOfMemoryError: No room.

    Source: layout of vllm-gaudi, v1/worker/hpu_model_runner.py, initialize_kv_cache; graph limits of the vendor's documentation.
    """

    any_thread = False
    kernels = "gaudi"

    def __init__(
        self, layers: tuple[AttentionLayer, ...], *, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self._flat: list[torch.Tensor] = []
        super().__init__(layers, num_blocks=num_blocks, block_size=block_size, device=device)

    def _empty(self, part: int, layer: AttentionLayer, head_dim: int) -> torch.Tensor:
        num_slots = (self.num_blocks + 1) * self.block_size
        flat = torch.zeros(num_slots, layer.num_kv_heads, head_dim, dtype=layer.dtype, device=self.device)
        self._flat.append(flat)
        return torch.unflatten(flat, 0, (-1, self.block_size))

    def flat_layer(self, layer_index: int) -> FlatLayer:
        """Return keys and values of the layer with a module's ``layer_idx``."""
        at = self._at[layer_index]
        return FlatLayer(self._flat[at], self._flat[len(self.layers) + at], self.block_size, self.layers[at].window)

    def write(self, layer_index: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new keys and values in place; as in the base class."""
        self.flat_layer(layer_index).write(slots, keys, values)

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy blocks in place, all layers; every source is read before any target is written.

        Args:
            sources: int64 ``[n]``.
            targets: int64 ``[n]``, no block twice but the padding block.
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
