"""What an operator should know about a Redis or Valkey server that is to keep KV blocks; asked once, through redis-py."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from trencadis_kv.connectors.redis.address import RedisAddress
from trencadis_kv.connectors.redis.config import RedisConfig

__all__ = ["RedisControl", "advice"]

logger = logging.getLogger("trencadis.kv.redis")


class RedisControl:
    """Looks at a server once, and logs what could be better. Called from any thread; never raises.

    Args:
        config: How the server is reached.
    """

    def __init__(self, config: RedisConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._is_done = False

    def look(self) -> None:
        """Log version and advice, the first time that the server answers."""
        with self._lock:
            if self._is_done:
                return
            self._is_done = True
        address = RedisAddress.parse(self._config.url)
        try:
            info = self._info(address)
        except Exception as error:  # control is a courtesy: a server that forbids INFO still keeps blocks
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
    """Return what an operator should change on a server, as sentences. Pure.

    Args:
        info: Its INFO.
        ttl_s: After so many seconds it forgets our blocks; 0: never.

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
    """Return what the server is; Valkey also says which Redis it stands in for."""
    if "valkey_version" in info:
        return "Valkey", str(info["valkey_version"])
    return "Redis", str(info.get("redis_version", "of unknown version"))
