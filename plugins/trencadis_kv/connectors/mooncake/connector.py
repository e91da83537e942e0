"""KV blocks in the memory of several engines, shared through Mooncake: how the connector is put together."""

from __future__ import annotations

from collections.abc import Callable

from trencadis.interfaces import ComponentContext, ConnectorPair
from trencadis_kv.connectors.mooncake.client import MooncakeClient, check_package
from trencadis_kv.connectors.mooncake.config import MooncakeConfig
from trencadis_kv.connectors.mooncake.store import BadKeys, MooncakeStore
from trencadis_kv.store.store_connector import store_connector

__all__ = ["make_mooncake", "mooncake_stores"]


def make_mooncake(config: MooncakeConfig, context: ComponentContext) -> ConnectorPair:
    """Return the connector over the pool of the master that the config names; nothing is connected yet.

    Raises:
        ConfigError: The package mooncake is missing, or a library that it needs.
    """
    return store_connector(mooncake_stores(config), config, context, name="mooncake")


def mooncake_stores(config: MooncakeConfig) -> Callable[[], MooncakeStore]:
    """Return what makes a store, one for each thread that needs one; raises what :func:`make_mooncake` does."""
    check_package()
    client, bad = MooncakeClient(config), BadKeys()
    return lambda: MooncakeStore(client, bad, config)
