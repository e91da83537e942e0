"""Config table of the connector ``simulated_store``."""

from __future__ import annotations

import attrs
from attrs.validators import ge, gt

from trencadis.interfaces import setting

__all__ = ["SimulatedStoreConfig"]


@attrs.frozen(kw_only=True)
class SimulatedStoreConfig:
    """Table ``[kv_connector.simulated_store]``: capacity, bandwidth and latency of a store.

    The replica's link and the store serve a load or save at the same time, each in the order in which transfers begin; the transfer
    ends when both are done and ``latency_s`` has passed. Loads and saves share link and store.
    """

    shared: bool = setting(
        True,
        "One store for all replicas, which outlives them; false: one for each, such as the memory of its host, which is gone when the "
        "replica fails.",
    )
    capacity_bytes: int = setting(
        256 << 30,
        "KV that a store holds; the blocks that were used longest ago go first.",
        unit="bytes",
        validator=ge(1),
    )
    link_bytes_per_s: float = setting(
        25e9, "Bandwidth between one replica and the store.", unit="bytes/s", validator=gt(0)
    )
    store_bytes_per_s: float = setting(
        0.0,
        "Bandwidth of a store, for all links together; 0: the links alone limit it.",
        unit="bytes/s",
        validator=ge(0),
    )
    latency_s: float = setting(0.0005, "Added to every load and save.", unit="s", validator=ge(0))
    staging_bytes: int = setting(
        4 << 30,
        "Memory of a replica for blocks on their way to the store; what finds no room is not saved.",
        unit="bytes",
        validator=ge(1),
    )
