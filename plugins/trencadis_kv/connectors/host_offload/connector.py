"""Connector ``host_offload``: KV blocks in host memory, for prefixes that do not fit on the device.

The memory is pageable: no driver is asked to pin it. Each object is allocated when it is stored, because a codec makes
objects of any size.
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
        config: Table ``[kv_connector.host_offload]``.
        context: Context of the component's factory; makes the configured eviction policy.
    """
    memory = HostMemory(config.capacity_bytes, eviction=context.make("eviction", config.eviction), clock=context.clock)
    return store_connector(lambda: HostStore(memory), config, context, name="host_offload", watch=memory.watch)
