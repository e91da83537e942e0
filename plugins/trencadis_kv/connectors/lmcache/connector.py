"""KV blocks in the stores that LMCache knows: how the connector is put together."""

from __future__ import annotations

from collections.abc import Callable

from trencadis.interfaces import ComponentContext, ConnectorPair
from trencadis_kv.connectors.lmcache.config import LMCacheConfig
from trencadis_kv.connectors.lmcache.library import LMCacheClient, check_package
from trencadis_kv.connectors.lmcache.store import LMCacheStore
from trencadis_kv.store.store_connector import store_connector

__all__ = ["lmcache_stores", "make_lmcache"]


def make_lmcache(config: LMCacheConfig, context: ComponentContext) -> ConnectorPair:
    """Return the connector over LMCache; nothing is connected yet.

    Raises:
        ConfigError: The package lmcache is missing.
    """
    return store_connector(lmcache_stores(config), config, context, name="lmcache")


def lmcache_stores(config: LMCacheConfig) -> Callable[[], LMCacheStore]:
    """Return what makes a store, one for each thread that needs one; raises what :func:`make_lmcache` does."""
    check_package()
    client = LMCacheClient(config)
    return lambda: LMCacheStore(client, config)
