"""How the connector is put together; whole engines with it are in ``tests/integration/redis``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trencadis.errors import ConfigError, ConfigValueError
from trencadis_kv.connectors.redis.config import RedisConfig
from trencadis_kv.connectors.redis.connector import redis_stores


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
