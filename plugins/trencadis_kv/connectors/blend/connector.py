"""Connector ``blend``: reuses the KV of text seen before, at other positions and in other order, with little recomputation.

    exact prompts ─▶ chunks, without positions ─▶ host memory
     prompts of requests that opt in ─▶ chunks found ─▶ positions applied ─▶ tokens that deviate most are recomputed

The result is approximate: only requests that opt in get it, their responses say so, and neither this engine's prefix
cache nor another connector stores it as exact KV.
"""

from __future__ import annotations

from collections.abc import Callable

from trencadis.interfaces import ComponentContext
from trencadis.interfaces.block_store import BlockStore
from trencadis_kv.connectors.blend.config import BlendConfig
from trencadis_kv.connectors.blend.index import ChunkIndex
from trencadis_kv.connectors.blend.messages import BlendShared
from trencadis_kv.connectors.blend.prompt import WindowHash
from trencadis_kv.connectors.blend.scheduler import BlendScheduler
from trencadis_kv.connectors.blend.worker import BlendWorker
from trencadis_kv.connectors.host_offload.host_memory import HostMemory, HostStore
from trencadis_kv.store.defaults import policy_of
from trencadis_kv.store.store_connector import StoreConnector

__all__ = ["blend_connector", "make_blend"]

_MAX_CHUNKS = 1 << 17
"""Maximum number of chunks in the index; the store's capacity is usually the tighter limit."""


def make_blend(config: BlendConfig, context: ComponentContext) -> StoreConnector:
    """Return a connector with host memory of its own.

    Args:
        config: Table ``[kv_connector.blend]``.
        context: Context of the component's factory; makes the configured eviction policy.
    """
    memory = HostMemory(config.capacity_bytes, eviction=context.make("eviction", config.eviction), clock=context.clock)
    return blend_connector(lambda: HostStore(memory), config, context)


def blend_connector(
    make_store: Callable[[], BlockStore], config: BlendConfig, context: ComponentContext
) -> StoreConnector:
    """Return a connector over a store of chunks, used by this connector alone.

    Args:
        make_store: Returns a new connection; called once per thread, and may wait and raise.
        config: Table ``[kv_connector.blend]``.
        context: Context of the component's factory.
    """
    shared = BlendShared(
        config=config,
        clock=context.clock,
        identity=context.model.identity if context.model is not None else "",
        make_store=make_store,
        policy=policy_of(context),
    )
    index = ChunkIndex(WindowHash(config.min_chunk_tokens), max_chunks=_MAX_CHUNKS)
    return StoreConnector(
        scheduler=BlendScheduler(shared, index, encode=lambda text: context.vocabulary().encode(text)),
        worker=BlendWorker(shared),
        with_stores=lambda wrap: blend_connector(lambda: wrap(make_store()), config, context),
    )
