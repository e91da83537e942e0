"""The connector ``blend`` over a fake cache, driven by hand."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from support.kv.fake_blender import BlendingCache
from trencadis.clock import SimulatedClock
from trencadis.engine.cache.hashing import BlockHasher
from trencadis.interfaces import ComponentContext
from trencadis.records import ConnectorReport, Request
from trencadis_kv.connectors.blend.config import BlendConfig
from trencadis_kv.connectors.blend.connector import make_blend
from trencadis_kv.interfaces import KVPolicy
from trencadis_plugins.eviction.lru import Lru
from trencadis_testing.fake_model import START, chain

BLOCK = 4


def document(seed: int, length: int = 16) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(1, 97) for _ in range(length))


A, B, C = document(1), document(2), document(3)
FIRST, PROMPT = (*A, *B, *C, 9), (*C, *A, *B, 5, 6)


class Always(KVPolicy):
    """Whatever is there is used."""


class BlendHands:
    """Both sides, and a cache of 64 blocks."""

    def __init__(
        self, config: BlendConfig | None = None, *, policy: Any = Always, pool: Any = None, separator: Any = ()
    ) -> None:
        self.clock = SimulatedClock()
        parts = {"eviction": Lru, "kv_policy": policy}

        class Words:
            encode = staticmethod(lambda text: separator)

        def make(noun: str, name: str) -> Any:
            return parts[noun]() if noun in parts else ComponentContext(clock=self.clock, seed=0).make(noun, name)

        self.config = config or BlendConfig(min_chunk_tokens=8, chunk_tokens=16)
        context = ComponentContext(clock=self.clock, seed=0, make=make, vocabulary=Words)  # type: ignore[arg-type]
        self.pair = make_blend(self.config, context)
        size = 64 * BLOCK
        self.arrays = (np.zeros(size, np.uint64), np.zeros(size, np.int64), np.zeros(size, np.int64))
        self.pool = pool or BlendingCache(self.arrays, block_size=BLOCK)
        self.pair.worker.register(self.pool)
        self.pair.scheduler.on_ready(self.pool.layout)

    @property
    def shared(self) -> Any:
        """What both sides share."""
        return self.pair.worker._shared  # type: ignore[attr-defined]

    @staticmethod
    def request(prompt: Any, *, params: Any = None, name: str = "r", **terms: Any) -> Request:
        return Request(request_id=name, prompt_token_ids=tuple(prompt), transfer_params=params, **terms)

    @staticmethod
    def hashes(prompt: Any, salt: str = "") -> list[bytes]:
        found: list[bytes] = []
        tokens = np.array(prompt, np.int32)
        BlockHasher(key="", compatibility="", block_size=BLOCK).extend(
            found, tokens, num_blocks=(len(tokens) - 1) // BLOCK, salt=salt
        )
        return found

    def lookup(
        self, prompt: Any, *, ratio: float | None = None, local: int = 0, params: Any = None, **terms: Any
    ) -> Any:
        params = params if ratio is None else {"blend": True, "blend_ratio": ratio}
        request = self.request(prompt, params=params, **terms)
        return self.pair.scheduler.lookup(request, block_hashes=self.hashes(prompt), num_local_tokens=local)

    def compute(self, prompt: Any, blocks: list[int]) -> None:
        state = START
        for position, token in enumerate(prompt):
            state = chain(state, token, position)
            slot = blocks[position // BLOCK] * BLOCK + position % BLOCK
            self.arrays[0][slot], self.arrays[1][slot], self.arrays[2][slot] = state, token, position

    def learn(self, prompt: Any, **terms: Any) -> None:
        """Compute a prompt and let its chunks be kept."""
        self.lookup(prompt, **terms)
        hashes = self.hashes(prompt)
        blocks = list(range(-(-len(prompt) // BLOCK)))
        self.compute(prompt, blocks)
        self.pair.scheduler.on_computed(blocks=blocks[: len(hashes)], block_hashes=hashes)
        self.step()
        self.lookup((1,))

    def step(self) -> ConnectorReport:
        """Carry a message over and its report back, with threads at rest before and after."""
        self.pair.worker.begin_step(self.pair.scheduler.take_message())
        self.pair.worker.end_step()
        assert self.pair.worker.wait_idle(60.0)  # type: ignore[attr-defined]
        report = self.pair.worker.poll()
        self.pair.scheduler.on_report(report)
        return report

    def close(self) -> None:
        self.pair.scheduler.close()
        self.pair.worker.close()
