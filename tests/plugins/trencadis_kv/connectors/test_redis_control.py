from __future__ import annotations

import logging
from typing import Any

import pytest

from support.kv.redis_server import running_redis
from trencadis_kv.connectors.redis.config import RedisConfig
from trencadis_kv.connectors.redis.connector import RedisControl, advice

GOOD = {"maxmemory": 2**30, "maxmemory_policy": "allkeys-lfu", "role": "master", "redis_mode": "standalone"}


def test_well_kept_server_needs_no_advice() -> None:
    assert advice(GOOD) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"maxmemory": 0}, "no maxmemory"),
        ({"maxmemory_policy": "noeviction"}, "keeps nothing new once it is full"),
        ({"maxmemory_policy": "volatile-lfu"}, "keeps nothing new once it is full"),
        ({"maxmemory_policy": "allkeys-lru"}, "set maxmemory-policy allkeys-lfu"),
        ({"role": "slave"}, "replica"),
        ({"redis_mode": "cluster"}, "cluster"),
        ({"aof_enabled": 1}, "append-only"),
    ],
)
def test_each_thing_that_could_be_better_is_said_once(change: dict[str, Any], says: str) -> None:
    (text,) = advice(GOOD | change)
    assert says in text


def test_volatile_policy_evicts_what_has_a_time_to_live() -> None:
    assert advice(GOOD | {"maxmemory_policy": "volatile-lfu"}, ttl_s=60) == []


def test_server_that_tells_little_is_not_accused() -> None:
    assert advice({}) == []


def test_real_server_is_looked_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with running_redis(maxmemory_policy="noeviction", requirepass="word") as server:
        control = RedisControl(RedisConfig(url=server.url, password="word"))
        with caplog.at_level(logging.INFO, "trencadis.kv.redis"):
            control.look()
            control.look()
    levels = [record.levelname for record in caplog.records]
    assert levels == ["INFO", "WARNING"]
    assert server.url in caplog.text
    assert "policy noeviction" in caplog.text
    assert "word" not in caplog.text


def test_unix_socket_is_looked_at_as_well(caplog: pytest.LogCaptureFixture) -> None:
    with running_redis() as server, caplog.at_level(logging.INFO, "trencadis.kv.redis"):
        RedisControl(RedisConfig(url=f"unix://{server.socket_path}")).look()
    assert "policy allkeys-lfu" in caplog.text


def test_server_that_does_not_tell_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with running_redis() as server, caplog.at_level(logging.INFO, "trencadis.kv.redis"):
        server.run("ACL", "SETUSER", "default", "-info")
        RedisControl(RedisConfig(url=server.url)).look()
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "does not tell" in caplog.text
