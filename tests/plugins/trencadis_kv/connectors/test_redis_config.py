"""Configuration of the Redis connector, and the parts of its URL."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from trencadis_kv.connectors.redis.config import RedisAddress, RedisConfig, without_password


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


def test_defaults_name_a_server_on_this_machine() -> None:
    assert RedisConfig().url == "redis://127.0.0.1:6379"


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


def test_every_setting_has_a_help_text() -> None:
    assert all(field.metadata["help"].strip() for field in attrs.fields(RedisConfig))
