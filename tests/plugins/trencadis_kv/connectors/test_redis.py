"""The Redis connector: checks of the server at start, and its factory."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from support.kv.redis_server import running_redis
from trencadis.errors import ConfigError, ConfigValueError
from trencadis_kv.connectors.redis.config import RedisConfig
from trencadis_kv.connectors.redis.connector import RedisControl, advice, redis_stores

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


def test_password_in_the_url_is_refused_without_being_repeated() -> None:
    with pytest.raises(ConfigValueError, match=r"kv_connector\.redis\.password") as caught:
        redis_stores(RedisConfig(url="redis://me:hunter2@host"))
    assert "hunter2" not in str(caught.value)


def test_missing_package_says_which_extra_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r'pip install "trencadis\[redis\]"'):
        redis_stores(RedisConfig())


def test_file_of_certificates_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = RedisConfig(url="rediss://127.0.0.1", tls_ca_path=str(tmp_path / "ca.pem"))
    with pytest.raises(ConfigValueError, match=r"kv_connector\.redis\.tls_ca_path = .*ca\.pem"):
        redis_stores(config)
