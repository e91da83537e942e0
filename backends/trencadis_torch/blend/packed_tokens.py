"""The KV of tokens without their positions, as bytes: token by token, keys of all layers in float32, then values of all layers.

Float32 whatever the cache's dtype: a key is rounded once, when it gets its new position, and not twice.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from trencadis_torch.blend.reposition import Angles, Pairs, unrotate
from trencadis_torch.cache.kv_cache import AttentionLayer

__all__ = ["PackedTokens"]


class PackedTokens:
    """Layout of a token's bytes.

    Args:
        layers: Attention layers of the model.
        pairs: Pairs of turned elements in each layer's keys.
        block_size: Tokens per block.

    Attributes:
        token_bytes: Size of one token, in bytes.
    """

    def __init__(self, layers: tuple[AttentionLayer, ...], pairs: tuple[Pairs, ...], *, block_size: int) -> None:
        self._layers = layers
        self._pairs = pairs
        self._block_size = block_size
        sizes = [4 * layer.num_kv_heads * layer.key_dim for layer in layers]
        sizes += [layer.dtype.itemsize * layer.num_kv_heads * layer.value_dim for layer in layers]
        self._firsts = np.cumsum([0, *sizes]).tolist()
        self.token_bytes = int(self._firsts[-1])

    def pack(self, blocks: NDArray[np.uint8], *, skip: int, num_tokens: int, angles: Angles) -> NDArray[np.uint8]:
        """Return tokens of blocks, ``[num_tokens, token_bytes]``. Pure.

        Args:
            blocks: ``[n, block_bytes]``.
            skip: Tokens of the first block that are left out.
            num_tokens: How many.
            angles: Angles of the tokens' positions, on the host.
        """
        packed = np.empty((num_tokens, self.token_bytes), np.uint8)
        first = 0
        for place, (layer, is_key) in enumerate((layer, is_key) for is_key in (True, False) for layer in self._layers):
            head_dim = layer.key_dim if is_key else layer.value_dim
            token_bytes = layer.num_kv_heads * head_dim * layer.dtype.itemsize
            part = blocks[:, first : first + self._block_size * token_bytes].reshape(-1, token_bytes)
            part = part[skip : skip + num_tokens]
            first += self._block_size * token_bytes
            if is_key:
                keys = _tensor(part, layer.dtype).float().view(num_tokens, layer.num_kv_heads, head_dim)
                plain = unrotate(keys, angles, self._pairs[place]).contiguous()
                part = plain.flatten(1).view(torch.uint8).numpy()
            packed[:, self._firsts[place] : self._firsts[place + 1]] = part
        return packed

    def keys(self, tokens: NDArray[np.uint8], place: int) -> torch.Tensor:
        """Return the keys of one layer without positions, float32 ``[n, KV, D]``, on the host."""
        layer = self._layers[place]
        part = tokens[:, self._firsts[place] : self._firsts[place + 1]]
        return _tensor(part, torch.float32).view(len(tokens), layer.num_kv_heads, layer.key_dim)

    def values(self, tokens: NDArray[np.uint8], place: int) -> torch.Tensor:
        """Return the values of one layer, ``[n, KV, Dv]``, on the host."""
        layer, at = self._layers[place], len(self._layers) + place
        part = tokens[:, self._firsts[at] : self._firsts[at + 1]]
        return _tensor(part, layer.dtype).view(len(tokens), layer.num_kv_heads, layer.value_dim)


def _tensor(part: NDArray[np.uint8], dtype: torch.dtype) -> torch.Tensor:
    """Return bytes as elements, ``[n, elements]``; a copy, for the memory may be read-only."""
    return torch.from_numpy(part.copy()).view(dtype)
