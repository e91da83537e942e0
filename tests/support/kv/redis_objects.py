"""Stores in Redis, and objects for them that are easily told apart."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from support.faultproxy import FaultProxy
from support.kv.redis_server import RedisServer
from trencadis_kv.connectors.redis.config import RedisConfig
from trencadis_kv.connectors.redis.connector import redis_stores
from trencadis_kv.connectors.redis.store import RedisStore

__all__ = ["BLOCK_BYTES", "keys", "num_clients", "objects", "read", "stores", "whole"]

BLOCK_BYTES = 100_000


@contextlib.contextmanager
def stores() -> Iterator[Callable[..., RedisStore]]:
    """Give what makes stores at a server, or at a way to one; they are closed when the block ends."""
    made = []

    def make(where: RedisServer | FaultProxy, **options: Any) -> RedisStore:
        store = redis_stores(RedisConfig(**{"url": f"redis://127.0.0.1:{where.port}", **options}))()
        made.append(store)
        return store

    yield make
    for store in made:
        store.close()


def keys(count: int) -> list[str]:
    """Return keys in the format of blocks. Pure."""
    return [f"kv1/default/{'ab' * 16}/0.0.0-8/{number:064x}" for number in range(count)]


def objects(count: int, num_bytes: int = BLOCK_BYTES) -> list[list[memoryview]]:
    """Return objects of three pieces, one of them empty, each of a content of its own. Pure."""
    pattern = bytes(range(256)) * (num_bytes // 256 + 2)
    return [
        [memoryview(b"%08d" % number), memoryview(b""), memoryview(pattern)[number : number + num_bytes - 8]]
        for number in range(count)
    ]


def whole(pieces: list[memoryview]) -> bytes:
    """Return an object in one piece. Pure."""
    return b"".join(pieces)


def num_clients(server: RedisServer) -> int:
    """Return how many clients there are, the one that asks not counted."""
    return len(server.run("CLIENT", "LIST", "TYPE", "normal").splitlines()) - 1


def read(store: RedisStore, count: int, num_bytes: int = BLOCK_BYTES) -> list[bytes | None]:
    """Return what the store has under the first keys, None where it has nothing."""
    targets = [memoryview(bytearray(num_bytes)) for _ in range(count)]
    sizes = store.get(keys(count), targets)
    assert len(sizes) == count
    return [bytes(target[:size]) if size >= 0 else None for target, size in zip(targets, sizes, strict=True)]
