"""Config table of the connector over a Mooncake store."""

from __future__ import annotations

import re

import attrs
from attrs.validators import and_, ge, gt, in_, le

from trencadis.interfaces import setting
from trencadis_kv.store.settings import SharedStoreSettings

__all__ = ["MooncakeConfig"]


def _is_address(_: object, attribute: attrs.Attribute[str], address: str) -> None:
    found = re.fullmatch(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%]+\]):(\d{1,5})", address)
    if found is None or not 0 < int(found[1]) < 65536:
        raise ValueError(f"{attribute.name} must be host:port, got {address!r}")


@attrs.frozen(kw_only=True)
class MooncakeConfig(SharedStoreSettings):
    """Table ``[kv_connector.mooncake]``: the master that knows where objects are, and the memory that this engine adds to the pool."""

    master: str = setting("127.0.0.1:50051", "Host and port of mooncake_master.", validator=_is_address)
    local_host: str = setting("127.0.0.1", "Address that the other engines of the pool reach this one by.")
    metadata: str = setting(
        "P2PHANDSHAKE",
        "Mooncake's metadata server; ``P2PHANDSHAKE`` needs none.",
        validator=attrs.validators.min_len(1),
    )
    protocol: str = setting("tcp", "How blocks move: ``tcp`` or ``rdma``.", validator=in_(("tcp", "rdma")))
    rdma_devices: str = setting("", "Names of RDMA devices, separated by commas; empty: Mooncake chooses.")
    pool_bytes: int = setting(
        1 << 30,
        "Host memory that this engine adds to the pool, and each of its ranks that has a process of its own; 0: none. What lies in it is "
        "lost when the process ends.",
        unit="bytes",
        validator=ge(0),
    )
    buffer_bytes: int = setting(
        8 << 20,
        "Host memory that each thread moves blocks through.",
        unit="bytes",
        validator=ge(4096),
    )
    num_replicas: int = setting(
        1, "Copies of each block, on as many engines.", unit="copies", validator=and_(ge(1), le(64))
    )
    close_timeout_s: float = setting(
        6.0,
        "The longest that blocks not saved yet are still written at the end; leaving the pool takes some seconds of it.",
        unit="s",
        validator=and_(ge(0), le(60)),
    )
    io_timeout_s: float = setting(
        5.0, "A call that takes longer has failed; it is abandoned.", unit="s", validator=and_(gt(0), le(60))
    )
    max_left_calls: int = setting(
        8,
        "With so many calls abandoned, no other is begun until one returns.",
        unit="calls",
        validator=and_(ge(1), le(1024)),
    )
