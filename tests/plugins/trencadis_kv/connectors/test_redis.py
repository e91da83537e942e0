"""The Redis connector: checks of the server at start, and its factory."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from support.kv.redis_server import running_redis
from trencadis.errors import ConfigError, ConfigValueError
from trencadis_kv.connectors.redis.config import RedisAddress, RedisConfig, without_password
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


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://host", RedisAddress(host="host")),
        ("redis://host:7000/3", RedisAddress(host="host", port=7000, database=3)),
        ("rediss://cache.example:6380", RedisAddress(host="cache.example", port=6380, tls=True)),
        ("valkey://10.0.0.1", RedisAddress(host="10.0.0.1")),
        ("valkeys://10.0.0.1", RedisAddress(host="10.0.0.1", tls=True)),
        ("redis://kv@[::1]:6379", RedisAddress(host="::1", user="kv")),
        ("redis://a%40b@host", RedisAddress(host="host", user="a@b")),
        ("unix:///run/redis.sock", RedisAddress(path="/run/redis.sock")),
        ("unix://kv@/run/redis.sock?db=2", RedisAddress(path="/run/redis.sock", user="kv", database=2)),
    ],
)
def test_url_names_an_address(url: str, address: RedisAddress) -> None:
    assert RedisAddress.parse(url) == address


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://host", "must begin with redis://"),
        ("127.0.0.1:6379", "must begin with redis://"),
        ("", "must begin with redis://"),
        ("redis://", "must name a host"),
        ("redis://host:0", "1 .. 65535"),
        ("redis://host:99999", "[Pp]ort"),
        ("redis://host/first", "number of a database"),
        ("unix://relative.sock", "absolute path"),
        ("unix:///s?db=x", "number of a database"),
    ],
)
def test_what_is_no_address_is_refused_in_words(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RedisAddress.parse(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me:hunter2@host", "redis://me:***@host"),
        ("redis://:host@host", "redis://:***@host"),
        ("unix://me:a%3Ab@/s", "unix://me:***@/s"),
        ("redis://me@host", "redis://me@host"),
        ("redis://me:@host", "redis://me:@host"),
    ],
)
def test_password_of_a_url_can_be_left_out(url: str, shown: str) -> None:
    assert without_password(url) == shown
    assert "hunter2" not in repr(RedisAddress.parse(url))


@pytest.mark.parametrize("url", ["redis://host:7000/3", "rediss://h:1", "redis://[::1]:6379", "unix:///s"])
def test_address_reads_as_the_url_it_came_from(url: str) -> None:
    assert str(RedisAddress.parse(url)) == url


def test_password_is_never_printed() -> None:
    assert attrs.fields(RedisConfig).password.metadata["secret"]


@pytest.mark.parametrize(
    "values",
    [
        {"url": "http://host"},
        {"ttl_s": -1},
        {"connect_timeout_s": 0.0},
        {"io_timeout_s": 0.0},
        {"io_timeout_s": 61.0},
    ],
)
def test_impossible_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        RedisConfig(**values)
