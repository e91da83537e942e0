"""KV blocks in a Redis or Valkey server: how the connector is put together."""

from __future__ import annotations

import importlib
import ssl
from collections.abc import Callable

from trencadis.errors import ConfigError, ConfigValueError
from trencadis.interfaces import ComponentContext, ConnectorPair
from trencadis_kv.connectors.redis.address import RedisAddress, without_password
from trencadis_kv.connectors.redis.config import RedisConfig
from trencadis_kv.connectors.redis.control import RedisControl
from trencadis_kv.connectors.redis.link import Credentials, RedisLink, Timeouts
from trencadis_kv.connectors.redis.store import RedisStore
from trencadis_kv.store.store_connector import store_connector

__all__ = ["make_redis", "redis_stores"]


def make_redis(config: RedisConfig, context: ComponentContext) -> ConnectorPair:
    """Return the connector over the server that the config names; nothing is connected yet.

    Raises:
        ConfigError: The package redis is missing.
        ConfigValueError: A file of certificates or keys cannot be read, or the URL carries a password.
    """
    return store_connector(redis_stores(config), config, context, name="redis")


def redis_stores(config: RedisConfig) -> Callable[[], RedisStore]:
    """Return what makes a store, one for each thread that needs one; raises what :func:`make_redis` does."""
    try:
        importlib.import_module("redis")
    except ImportError as error:
        raise ConfigError(
            f"kv_connector.name = 'redis' needs the package redis, which cannot be imported: {error}.",
            hint='Run pip install "trencadis[redis]".',
        ) from error
    if (shown := without_password(config.url)) != config.url:
        raise ConfigValueError(  # here and not in the config class: what that refuses is printed as it is
            f"kv_connector.redis.url = '{shown}' carries a password; URLs are printed, in logs and by trencadis config.",
            hint="Take it out, and set kv_connector.redis.password.",
        )
    address = RedisAddress.parse(config.url)
    credentials = Credentials(user=address.user, password=config.password, tls=_tls(config) if address.tls else None)
    timeouts = Timeouts(connect_s=config.connect_timeout_s, io_s=config.io_timeout_s)
    control = RedisControl(config)

    def make_store() -> RedisStore:
        return RedisStore(
            lambda: RedisLink(address, credentials, timeouts),
            address,
            ttl_s=config.ttl_s,
            on_connect=control.look,
        )

    return make_store


def _tls(config: RedisConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=config.tls_ca_path or None)
        if config.tls_cert_path:
            context.load_cert_chain(config.tls_cert_path, config.tls_key_path or None)
    except OSError as error:  # also what is no certificate
        paths = ", ".join(
            f"kv_connector.redis.{name} = {path!r}"
            for name in ("tls_ca_path", "tls_cert_path", "tls_key_path")
            if (path := getattr(config, name))
        )
        raise ConfigValueError(
            f"{paths}: {error}.", hint="Name files in PEM format that this user may read."
        ) from error
    return context
