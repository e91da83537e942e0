from __future__ import annotations

from typing import Any

import attrs
import pytest

from trencadis_kv.connectors.redis.config import RedisConfig


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
