"""A real Redis server, a way to it that can be disturbed, and stores and engines that use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.faultproxy import FaultProxy
from support.kv.redis_objects import stores
from support.kv.redis_scene import Scene
from support.kv.redis_server import RedisServer, running_redis
from trencadis_kv.connectors.redis.store import RedisStore


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisServer]:
    """One server for all tests of a file that do not end it."""
    with running_redis() as server:
        yield server


@pytest.fixture
def server(shared: RedisServer) -> RedisServer:
    """The same, empty."""
    shared.run("FLUSHALL")
    return shared


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[FaultProxy]:
    """A way to the empty server."""
    with FaultProxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def store_at() -> Iterator[Callable[..., RedisStore]]:
    """``store_at(server, **settings)``: closed after the test."""
    with stores() as make:
        yield make


@pytest.fixture
def scene_at() -> Iterator[Callable[..., Scene]]:
    """``scene_at(port, **settings)``: torn down after the test."""
    scenes = []

    def make(port: int, **options: Any) -> Scene:
        scenes.append(Scene(port, **options))
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.teardown_method()
