"""Sequences with known keys and values, laid out in a KV cache of blocks, and the attention they must get."""

from __future__ import annotations

import numpy as np
import torch

from support.backends.dense_attention import dense_attention
from support.backends.passes import make_pass
from trencadis.records import Bucket, Pass
from trencadis_gaudi.flat_cache import FlatKVCache
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.cache.kv_cache import AttentionLayer

NUM_HEADS, NUM_KV_HEADS, KEY_DIM, VALUE_DIM = 4, 2, 8, 6
OPTIONS = ({}, {"softcap": 1.5}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, {"scale": 0.7})


class Scene:
    """One layer, some sequences; blocks in random order, the first ``num_shared`` columns common to all sequences.

    What no sequence owns holds large numbers: reading it shows.
    """

    def __init__(
        self,
        sequences: list[tuple[int, int]],
        *,
        window: int = 0,
        size: int = 4,
        num_blocks: int = 40,
        num_shared: int = 0,
        value_dim: int = VALUE_DIM,
        seed: int = 0,
        make_cache=FlatKVCache,
    ) -> None:
        self.sequences, self.window, self.seed = sequences, window, seed
        generator = self._generator = torch.Generator().manual_seed(seed)
        layer = AttentionLayer(
            index=0,
            num_kv_heads=NUM_KV_HEADS,
            key_dim=KEY_DIM,
            value_dim=value_dim,
            window=window,
            dtype=torch.float32,
        )
        self.cache = make_cache((layer,), num_blocks=num_blocks, block_size=size, device=torch.device("cpu"))
        for part in self.cache.layer(0):
            part[:num_blocks] = 1e3
        ends = [context + length for context, length in sequences]
        width = max([-(-end // size) for end in ends], default=1)
        order = iter(torch.randperm(num_blocks, generator=generator).tolist())
        common = [next(order) for _ in range(num_shared)]
        self.tables = np.zeros((len(sequences) + 1, width), np.int32)
        self.whole = []
        begin = [self._random(num_shared * size, NUM_KV_HEADS, dim) for dim in (KEY_DIM, value_dim)]
        for row, end in enumerate(ends):
            count = -(-end // size)
            self.tables[row, :count] = (common + [next(order) for _ in range(max(0, count - num_shared))])[:count]
            rest = (self._random(max(0, end - num_shared * size), NUM_KV_HEADS, dim) for dim in (KEY_DIM, value_dim))
            self.whole.append([torch.cat([first[:end], last]) for first, last in zip(begin, rest, strict=True)])
            slots, context = self.slots(row, end), sequences[row][0]
            self.cache.write(0, slots[:context], *(part[:context] for part in self.whole[row]))

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator)

    def slots(self, row: int, end: int) -> torch.Tensor:
        """Return the slots of a sequence's first ``end`` tokens."""
        positions = torch.arange(end)
        size = self.cache.block_size
        return torch.from_numpy(self.tables)[row, positions // size].long() * size + positions % size

    def one(self, bucket: Bucket) -> Pass:
        """Return the pass over all sequences."""
        starts, lengths = zip(*self.sequences, strict=True) if self.sequences else ((), ())
        return make_pass(bucket, range(len(starts)), starts, lengths)

    def check(self, attention, firsts, num_tokens: int, **options) -> torch.Tensor:
        """Let the layer attend, and compare every real token's output with the definition; returns all outputs."""
        value_dim = self.cache.layer(0)[1].shape[-1]
        query = self._random(num_tokens, NUM_HEADS, KEY_DIM)
        keys, values = (
            self._random(num_tokens, NUM_KV_HEADS, KEY_DIM),
            self._random(num_tokens, NUM_KV_HEADS, value_dim),
        )
        for row, (context, length) in enumerate(self.sequences):
            here = slice(int(firsts[row]), int(firsts[row]) + length)
            keys[here], values[here] = (part[context:] for part in self.whole[row])
        layer = self.cache.flat_layer(0) if isinstance(self.cache, FlatKVCache) else 0
        found = attention.attend(layer, query, keys, values, options=AttentionOptions(**options))
        assert found.shape == (num_tokens, NUM_HEADS, value_dim)
        assert found.isfinite().all()
        for row, (context, length) in enumerate(self.sequences):
            here = slice(int(firsts[row]), int(firsts[row]) + length)
            positions = list(range(context, context + length))
            expected = dense_attention(
                query[here], *self.whole[row], positions=positions, window=self.window, **options
            )
            torch.testing.assert_close(found[here].double(), expected, atol=2e-5, rtol=0)
        return found
