"""Engines that share what they stored; what was damaged, exchanged or evicted meanwhile is computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest

from support.kv.redis_scene import FACTS, NUM_PROMPTS, OBJECT_BYTES, PROMPT_BLOCKS, Scene, block_keys, served, warm
from support.kv.redis_server import RedisServer
from trencadis.interfaces.block_store import BlockStore

# ------------------------------------------------------------------------------------------------- who shares


def test_two_engines_on_one_server_share_prefixes(server: RedisServer, scene_at: Callable[..., Scene]) -> None:
    warm(scene_at(server.port), server)
    with scene_at(server.port).engine() as other:
        assert served(other, "other") == NUM_PROMPTS * PROMPT_BLOCKS * 4


@pytest.mark.parametrize(
    "options",
    [
        {"facts": attrs.evolve(FACTS, fingerprint="two")},
        {"facts": attrs.evolve(FACTS, dtype="bfloat16")},
        {"namespace": "another"},
    ],
    ids=["weights", "dtype", "namespace"],
)
def test_engine_of_another_kind_hits_nothing(
    server: RedisServer, scene_at: Callable[..., Scene], options: dict[str, Any]
) -> None:
    warm(scene_at(server.port), server)
    with scene_at(server.port, **options).engine() as other:
        served(other, "other")
        assert other.books.causes.total() == 0
    keys = block_keys(server)
    assert len(keys) == 2 * (NUM_PROMPTS - 1) * PROMPT_BLOCKS, "the two share objects"
    assert len({key.rsplit("/", 2)[0] for key in keys}) == 2


def test_keys_are_those_of_the_format(server: RedisServer, scene_at: Callable[..., Scene]) -> None:
    warm(scene_at(server.port), server)
    version, namespace, compat, _, block_hash = block_keys(server)[0].split("/")
    assert (version, namespace, len(compat), len(block_hash)) == ("kv1", "default", 32, 64)
    assert server.run("STRLEN", block_keys(server)[0]) == OBJECT_BYTES


# --------------------------------------------------------------------------------- what was stored is damaged


def test_overwritten_objects_are_computed_and_saved_again(server: RedisServer, scene_at: Callable[..., Scene]) -> None:
    warm(scene_at(server.port), server)
    for number, key in enumerate(block_keys(server)):
        server.run("SETRANGE", key, (number * 13) % 100, b"\xff\x00\xff")
    with scene_at(server.port).engine() as one:
        served(one, "damaged")
        # A block that was found to be broken is deleted at once: who loads the same prompt later misses it.
        assert "corrupt" in one.books.causes
        assert set(one.books.causes) <= {"corrupt", "evicted"}
        for number in range(20):
            if served(one, f"again {number}") == NUM_PROMPTS * PROMPT_BLOCKS * 4:
                return
    raise AssertionError("broken objects were not replaced")


def test_swapped_values_are_not_believed(server: RedisServer, scene_at: Callable[..., Scene]) -> None:
    warm(scene_at(server.port), server)
    keys = block_keys(server)
    values = server.run("MGET", *keys)
    for key, value in zip(keys, values[1:] + values[:1], strict=True):
        server.run("SET", key, value)
    with scene_at(server.port).engine() as one:
        served(one, "swapped")
        assert "corrupt" in one.books.causes
        assert set(one.books.causes) <= {"corrupt", "evicted"}


@pytest.mark.parametrize("change", [b"", b"longer than any object can be" * 100, b"KVB1"])
def test_values_of_another_length_are_not_believed(
    server: RedisServer, scene_at: Callable[..., Scene], change: bytes
) -> None:
    warm(scene_at(server.port), server)
    for key in block_keys(server):
        server.run("SET", key, change)
    with scene_at(server.port).engine() as one:
        assert served(one, "changed") <= PROMPT_BLOCKS * 4
        assert one.books.causes


class Evicting(BlockStore):
    """A store that loses some keys just before they are read: what eviction does between a look-up and a load."""

    def __init__(self, inner: BlockStore, evict: Callable[[Sequence[str]], None]) -> None:
        self._inner = inner
        self._evict = evict

    def get(self, keys: Sequence[str], targets: Sequence[memoryview]) -> Sequence[int]:
        self._evict(keys)
        return self._inner.get(keys, targets)

    def contains(self, keys: Sequence[str]) -> int:
        return self._inner.contains(keys)

    def put(self, keys: Sequence[str], objects: Sequence[Sequence[memoryview]]) -> int:
        return self._inner.put(keys, objects)

    def delete(self, keys: Sequence[str]) -> None:
        self._inner.delete(keys)

    def interrupt(self) -> None:
        self._inner.interrupt()

    def close(self) -> None:
        self._inner.close()


def test_blocks_before_one_that_was_evicted_after_the_lookup_are_used(
    server: RedisServer, scene_at: Callable[..., Scene]
) -> None:
    warm(scene_at(server.port), server)
    scene = scene_at(server.port)

    def evict(keys: Sequence[str]) -> None:
        if len(keys) > 5:
            server.run("DEL", keys[5])

    pair: Any = scene.make_one()
    with scene.engine(pair.with_stores(lambda store: Evicting(store, evict))) as one:
        assert served(one, "evicted") >= 5 * 4
        assert set(one.books.causes) == {"evicted"}
