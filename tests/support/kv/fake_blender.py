"""A blender for the fake backend's cache: at ratio NEARLY_ALL its states are the model's, below it they are recognisably others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
import numpy as np

from trencadis.interfaces import BlendOrder, KVBlender
from trencadis.records import KVLayout
from trencadis_testing.fake_model import START, chain
from trencadis_testing.fake_pool import FakeKVCache
from trencadis_testing.fakes import FakeBackend

NEARLY_ALL = 1.0 - 2**-30
"""A share of tokens that rounds up to all of them, below 1, which is computed without blending."""

OTHER = 1 << 40
"""Added to every state that is approximate."""


class FakeBlender(KVBlender):
    """Packs tokens alone; a chunk whose tokens are not those of the prompt is an error.

    Attributes:
        num_parts: In how many parts it does its work.
        orders: All it was given.
        raises: Raised in the last but one, if any; that one does the work.
        tick: Called in every part: lets time pass.
    """

    token_bytes = 8

    def __init__(self, pool: BlendingCache) -> None:
        self._pool = pool
        self.num_parts = 3
        self.orders: list[BlendOrder] = []
        self.raises: Exception | None = None
        self.tick: Callable[[], None] = lambda: None

    def pack(self, blocks: np.ndarray, *, skip: int, num_tokens: int, position: int) -> np.ndarray:
        size = self._pool.layout.block_size
        arrays = [blocks[:, i * size * 8 : (i + 1) * size * 8].copy().view(np.int64).reshape(-1) for i in range(3)]
        inside = slice(skip, skip + num_tokens)
        assert arrays[2][inside].tolist() == list(range(position, position + num_tokens)), "another place's blocks"
        return arrays[1][inside].copy().view(np.uint8).reshape(num_tokens, 8)

    def blend(self, order: BlendOrder) -> Iterator[None]:
        self.orders.append(order)
        for _ in range(self.num_parts - 2):
            self.tick()
            yield
        self.tick()
        if self.raises is not None:
            raise self.raises
        for chunk in order.chunks:
            tokens = np.ascontiguousarray(chunk.tokens).view(np.int64).reshape(-1)
            wanted = order.token_ids[chunk.position : chunk.position + len(tokens)]
            assert tokens.tolist() == wanted.tolist(), "another chunk's tokens"
        size = self._pool.layout.block_size
        state = START
        for position, token in enumerate(order.token_ids.tolist()):
            state = chain(state, token, position)
            if position < order.num_exact:
                continue
            slot = int(order.blocks[position // size]) * size + position % size
            self._pool[0][slot] = np.uint64(state if order.ratio >= NEARLY_ALL else state ^ OTHER)
            self._pool[1][slot], self._pool[2][slot] = token, position
        yield


class BlendingCache(FakeKVCache):
    """A fake cache that blends, of one layer: everything goes through the first."""

    layerwise = False

    @property
    def layout(self) -> KVLayout:
        whole = super().layout
        return attrs.evolve(whole, parts=tuple(attrs.evolve(part, layer=0) for part in whole.parts))

    def blender(self) -> FakeBlender:
        if "made" not in self.__dict__:
            self.made = FakeBlender(self)
        return self.made


class BlendingBackend(FakeBackend):
    """A fake backend whose cache blends; its sequences may read approximate states."""

    def __init__(self, **options: object) -> None:
        super().__init__(**{"strict": False, "eos": -1, **options})  # type: ignore[arg-type]

    def kv_cache(self) -> BlendingCache:
        if "cache" not in self.__dict__:
            self.cache = BlendingCache(tuple(super().kv_cache()), block_size=self._block_size)
        return self.cache
