"""KV of texts by the model's own forward, blocks to blend in, and how far what was blended is from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trencadis.interfaces import BlendChunk, BlendOrder
from trencadis_torch.attention import adapter
from trencadis_torch.attention.adapter import PASS_ARGUMENT
from trencadis_torch.attention.whole_texts import WholeTexts
from trencadis_torch.blend.blender import Blender, make_blender
from trencadis_torch.cache.kv_cache import PagedKVCache, stored_layers
from trencadis_torch.loading.inspection import attention_layers

BLOCK_SIZE = 4


class _Kept(WholeTexts):
    """Attends, and keeps what the layers made."""

    def __init__(self, layers: Any, lengths: list[int]) -> None:
        super().__init__(layers, lengths)
        self.found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(self, layer_index: int, query: Any, keys: Any, values: Any, **options: Any) -> torch.Tensor:
        self.found.append((keys, values))
        return super().attend(layer_index, query, keys, values, **options)


class BlendScene:
    """A model, a cache whose blocks hold noise, and a blender."""

    def __init__(
        self, model: Any, *, num_blocks: int = 64, block_size: int = BLOCK_SIZE, kv_dtype: str = "auto"
    ) -> None:
        self.model = model
        layers = stored_layers(attention_layers(model), kv_dtype)
        adapter.register()
        adapter.switch(model, adapter.PAGED)
        self.cache = PagedKVCache(layers, num_blocks=num_blocks, block_size=block_size, device=model.device)
        for part in self.cache.parts:
            part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(3)).to(part.dtype))
        self.blender: Blender = make_blender(model, self.cache)

    @torch.inference_mode()
    def exact(self, tokens: np.ndarray, *, position: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return keys and values of every layer of a text that begins at a position, ``[T, KV, D]``."""
        kept = _Kept(self.cache.layers, [len(tokens)])
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        positions = torch.arange(position, position + len(tokens))[None]
        self.model.base_model(input_ids=ids, position_ids=positions, use_cache=False, **{PASS_ARGUMENT: kept})
        return kept.found

    def packed(self, tokens: np.ndarray, *, position: int = 0) -> np.ndarray:
        """Return a text computed alone at a position, as the blender packs it from blocks."""
        skip = position % self.cache.block_size
        num_blocks = -(-(skip + len(tokens)) // self.cache.block_size)
        blocks = np.zeros((num_blocks, self.cache.layout.block_bytes), np.uint8)
        before = self._contents()
        slots = torch.arange(skip, skip + len(tokens))
        for index, (keys, values) in enumerate(self.exact(tokens, position=position)):
            self.cache.write(index, slots, keys, values)
        self.cache.read_blocks(range(num_blocks), blocks)
        self._put_back(before)
        return self.blender.pack(blocks, skip=skip, num_tokens=len(tokens), position=position)

    def put(self, tokens: np.ndarray, blocks: list[int]) -> None:
        """Write the KV of a text from position 0 on into blocks."""
        for index, (keys, values) in enumerate(self.exact(tokens)):
            self.cache.write(index, self.slots(blocks)[: len(tokens)], keys, values)

    def blend(
        self,
        tokens: np.ndarray,
        blocks: list[int],
        chunks: list[tuple[int, np.ndarray]],
        *,
        ratio: float,
        num_exact: int = 0,
        forced: tuple[int, ...] = (),
    ) -> int:
        """Blend to the end; returns how many parts the work had."""
        must = np.zeros(len(tokens), np.bool_)
        must[list(forced)] = True
        order = BlendOrder(
            token_ids=tokens.astype(np.int32),
            num_exact=num_exact,
            blocks=np.array(blocks, np.int32),
            chunks=tuple(BlendChunk(position=position, tokens=part) for position, part in chunks),
            ratio=ratio,
            forced=must,
        )
        return sum(1 for _ in self.blender.blend(order))

    def held(self, blocks: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return what blocks hold: keys and values of every layer, ``[T, KV, D]``."""
        slots = self.slots(blocks)
        return [
            tuple(part.flatten(0, 1)[slots].clone() for part in self.cache.layer(layer.index))  # type: ignore[misc]
            for layer in self.cache.layers
        ]

    def slots(self, blocks: list[int]) -> torch.Tensor:
        """Return the slots of blocks, in order."""
        size = self.cache.block_size
        return (torch.tensor(blocks)[:, None] * size + torch.arange(size)).flatten()

    def _contents(self) -> list[torch.Tensor]:
        return [part.clone() for part in self.cache.parts]

    def _put_back(self, contents: list[torch.Tensor]) -> None:
        for part, content in zip(self.cache.parts, contents, strict=True):
            part.copy_(content)


def error(found: list[tuple[torch.Tensor, torch.Tensor]], expected: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the largest difference over the largest element of its layer."""
    worst = 0.0
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            worst = max(worst, float((one.float() - other.float()).abs().max() / other.float().abs().max()))
    return worst


def mean_error(
    found: list[tuple[torch.Tensor, torch.Tensor]], expected: list[tuple[torch.Tensor, torch.Tensor]]
) -> float:
    """Return the root mean square difference over that of the expected, keys and values of all layers."""
    ups = [
        (a.float() - b.float()).square().mean() / b.float().square().mean()
        for x, y in zip(found, expected, strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    return float(torch.stack(ups).mean().sqrt())


def tokens_of(seed: int, count: int, vocab_size: int = 131) -> np.ndarray:
    """Return random token ids, int32."""
    return np.random.default_rng(seed).integers(3, vocab_size, count).astype(np.int32)
