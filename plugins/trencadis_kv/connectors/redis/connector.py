"""Connector ``redis``: KV blocks in a Redis or Valkey server; checks the server once."""

from __future__ import annotations

import importlib
import logging
import ssl
import threading
from collections.abc import Callable, Mapping
from typing import Any

from trencadis.errors import ConfigError, ConfigValueError
from trencadis.interfaces import ComponentContext, ConnectorPair
from trencadis_kv.connectors.redis.config import RedisAddress, RedisConfig, without_password
from trencadis_kv.connectors.redis.link import Credentials, RedisLink, Timeouts
from trencadis_kv.connectors.redis.store import RedisStore
from trencadis_kv.store.store_connector import store_connector

__all__ = ["RedisControl", "advice", "make_redis", "redis_stores"]

logger = logging.getLogger("trencadis.kv.redis")


class RedisControl:
    """Checks a server's settings once, and logs advice. From any thread; never raises.

    Args:
        config: Table ``[kv_connector.redis]``.
    """

    def __init__(self, config: RedisConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._is_done = False

    def look(self) -> None:
        """Log version and advice, at the server's first response."""
        with self._lock:
            if self._is_done:
                return
            self._is_done = True
        address = RedisAddress.parse(self._config.url)
        try:
            info = self._info(address)
        except Exception as error:  # advice is optional: a server that forbids INFO still keeps blocks
            logger.info("KV store %s does not tell about itself: %s", address, error)
            return
        name, version = _product(info)
        logger.info("KV store %s: %s %s, policy %s.", address, name, version, info.get("maxmemory_policy", "unknown"))
        for text in advice(info, ttl_s=self._config.ttl_s):
            logger.warning("KV store %s: %s", address, text)

    def _info(self, address: RedisAddress) -> Mapping[str, Any]:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        config = self._config
        place: dict[str, Any] = {"host": address.host, "port": address.port}
        if address.path:
            place = {"unix_socket_path": address.path}
        elif address.tls:
            place |= {
                "ssl": True,
                "ssl_ca_certs": config.tls_ca_path or None,
                "ssl_certfile": config.tls_cert_path or None,
                "ssl_keyfile": config.tls_key_path or None,
            }
        client = redis.Redis(
            **place,
            db=address.database,
            username=address.user or None,
            password=config.password or None,
            socket_timeout=config.io_timeout_s,
            socket_connect_timeout=config.connect_timeout_s,
            retry=Retry(NoBackoff(), 0),  # by default a silent server costs ten tries, seconds
        )
        with client:
            answer: Mapping[str, Any] = client.info()
            return answer


def advice(info: Mapping[str, Any], *, ttl_s: int = 0) -> list[str]:
    """Return recommended changes of a server's settings, as sentences. Pure.

    Args:
        info: Fields of the server's INFO.
        ttl_s: Lifetime of blocks on the server, seconds; 0: unlimited.

    Source: on two shared cores, a scan over 2,000 blocks left 20 to 85 of 200 often used ones under allkeys-lru and 199 under
    allkeys-lfu; https://redis.io/docs/latest/develop/reference/eviction/ says which policies evict what.
    """
    found = []
    policy = str(info.get("maxmemory_policy", "allkeys-lfu"))
    if info.get("role", "master") != "master":
        found.append("it is a replica and takes no blocks; name its primary in kv_connector.redis.url.")
    if str(info.get("redis_mode", "standalone")) == "cluster":
        found.append("it is a node of a cluster, which is not supported; name a server that is alone.")
    if not int(info.get("maxmemory", 1)):
        found.append("it has no maxmemory and grows until the machine has no memory left; set maxmemory.")
    if policy == "noeviction" or (policy.startswith("volatile") and not ttl_s):
        found.append(
            f"with maxmemory-policy {policy} it keeps nothing new once it is full; set maxmemory-policy allkeys-lfu."
        )
    elif not policy.endswith("lfu"):
        found.append(
            f"with maxmemory-policy {policy} prompts that come once push out those that come often; "
            "set maxmemory-policy allkeys-lfu."
        )
    if int(info.get("aof_enabled", 0)):
        found.append("it writes every block to its append-only file as well; set appendonly no, unless that is wanted.")
    return found


def _product(info: Mapping[str, Any]) -> tuple[str, str]:
    """Return product and version; Valkey also reports the Redis version that it is compatible with."""
    if "valkey_version" in info:
        return "Valkey", str(info["valkey_version"])
    return "Redis", str(info.get("redis_version", "of unknown version"))


def make_redis(config: RedisConfig, context: ComponentContext) -> ConnectorPair:
    """Return the connector over the configured server; connects on first use.

    Raises:
        ConfigError: The package redis is missing.
        ConfigValueError: A file of certificates or keys cannot be read, or the URL carries a password.
    """
    return store_connector(redis_stores(config), config, context, name="redis")


def redis_stores(config: RedisConfig) -> Callable[[], RedisStore]:
    """Return the factory of stores, one per thread; raises as :func:`make_redis`."""
    try:
        importlib.import_module("redis")
    except ImportError as error:
        raise ConfigError(
            f"kv_connector.name = 'redis' needs the package redis, which cannot be imported: {error}.",
            hint='Run pip install "trencadis[redis]".',
        ) from error
    if (shown := without_password(config.url)) != config.url:
        raise ConfigValueError(  # not in the config class, whose errors print the value
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
    except OSError as error:  # also for a file that is no certificate
        paths = ", ".join(
            f"kv_connector.redis.{name} = {path!r}"
            for name in ("tls_ca_path", "tls_cert_path", "tls_key_path")
            if (path := getattr(config, name))
        )
        raise ConfigValueError(
            f"{paths}: {error}.", hint="Name files in PEM format that this user may read."
        ) from error
    return context
