"""Connector ``host_offload``: KV blocks in host memory, for prefixes that do not fit on the device.

The memory is plain: no driver is asked to pin it. It is taken as objects come, object by object, because a codec makes objects of
any size.
"""

from __future__ import annotations

from trencadis.interfaces import ComponentContext, ConnectorPair
from trencadis_kv.connectors.host_offload.config import HostOffloadConfig
from trencadis_kv.connectors.host_offload.host_memory import HostMemory, HostStore
from trencadis_kv.store.store_connector import store_connector

__all__ = ["make_host_offload"]


def make_host_offload(config: HostOffloadConfig, context: ComponentContext) -> ConnectorPair:
    """Return a connector with host memory of its own.

    Args:
        config: Its table.
        context: Makes the eviction policy that the table names.
    """
    memory = HostMemory(config.capacity_bytes, eviction=context.make("eviction", config.eviction), clock=context.clock)
    return store_connector(lambda: HostStore(memory), config, context, name="host_offload", watch=memory.watch)
