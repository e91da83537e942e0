"""Config table of the connector between engines whose blocks go through NIXL."""

from __future__ import annotations

import attrs
from attrs.validators import and_, ge, in_, le

from trencadis.interfaces import setting
from trencadis_kv.connectors.p2p.config import P2PConfig

__all__ = ["NixlConfig"]


@attrs.frozen(kw_only=True)
class NixlConfig(P2PConfig):
    """Table ``[kv_connector.nixl]``: the options of ``p2p``, and the memory and network that blocks go through.

    Options of UCX are set as environment variables of the whole process; variables that are already set are left alone.
    """

    protocol: str = setting(
        "tcp",
        "``tcp``: without RDMA devices, also where their libraries are installed; ``rdma``: with.",
        validator=in_(("tcp", "rdma")),
    )
    transports: str = setting("", "UCX_TLS: transports that UCX may use, separated by commas; empty: it chooses.")
    devices: str = setting(
        "", "UCX_NET_DEVICES: network devices that UCX may use, separated by commas; empty: it chooses."
    )
    piece_bytes: int = setting(
        1 << 20, "Blocks are written in pieces of about this size.", unit="bytes", validator=ge(1)
    )
    num_pieces: int = setting(
        64,
        "Pieces of host memory, for what comes and what goes; a pull lends two, a pull by others takes one.",
        unit="pieces",
        validator=and_(ge(8), le(4096)),
    )
