"""What the connectors under test need: a directory, a server. Those without are skipped in words."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.kv.mooncake_master import MooncakeMaster, running_master
from support.kv.redis_server import RedisServer, running_redis


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    """A server with room for everything; tests that share it keep to namespaces of their own."""
    with running_redis() as server:
        yield server


@pytest.fixture(scope="session")
def shared_master() -> Iterator[MooncakeMaster]:
    """A master of Mooncake pools; engines that share it keep to namespaces of their own."""
    with running_master(client_ttl="2") as master:
        yield master


@pytest.fixture
def kv_connector_options(kv_connector_target: str, tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, object]:
    """A store of its own for every test."""
    name = kv_connector_target.split(",", maxsplit=1)[0]
    if name == "filesystem":
        return {"path": tmp_path / "blocks"}
    if name == "redis":
        return {"url": request.getfixturevalue("shared_redis").url, "namespace": uuid.uuid4().hex}
    if name == "lmcache":
        return {"remote_url": f"fs://localhost:0{tmp_path}", "local_bytes": 64 << 20}
    if name == "mooncake":
        address = request.getfixturevalue("shared_master").address
        return {"master": address, "namespace": uuid.uuid4().hex, "pool_bytes": 64 << 20, "start_timeout_s": 30}
    return {}
