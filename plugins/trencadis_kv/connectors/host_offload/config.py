"""Config tables of the built-in KV connectors."""

from __future__ import annotations

import attrs
from attrs.validators import ge

from trencadis.interfaces import setting
from trencadis_kv.store.settings import StoreSettings

__all__ = ["HostOffloadConfig"]


@attrs.frozen(kw_only=True)
class HostOffloadConfig(StoreSettings):
    """Table ``[kv_connector.host_offload]``: size of the host memory, and its eviction policy."""

    capacity_bytes: int = setting(
        4 << 30, "Host memory for blocks; taken from the system as it fills.", unit="bytes", validator=ge(1)
    )
    eviction: str = setting(
        "lru", "Which blocks go first when it is full: a component of the noun eviction.", component="eviction"
    )
