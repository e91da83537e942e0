"""Config table of the connector over a directory."""

from __future__ import annotations

import attrs
from attrs.validators import and_, ge, le, lt

from trencadis.interfaces import setting
from trencadis_kv.store.settings import SharedStoreSettings

__all__ = ["FilesystemConfig"]


@attrs.frozen(kw_only=True)
class FilesystemConfig(SharedStoreSettings):
    """Table ``[kv_connector.filesystem]``.

    Attributes:
        path: Directory of the blocks; created if missing.
        max_bytes: Maximum size of all objects in the directory, bytes; 0: no limit.
        low_water_ratio: Fraction of ``max_bytes`` that an eviction leaves.
        min_free_ratio: Fraction of the disk that saves leave free.
        fsync: Whether to wait for the disk after each block.
        trust_others: Whether to use a directory that other users own or can write to, and their objects.
    """

    path: str = setting("", "Directory of the blocks; empty: ~/.cache/trencadis/kv, or below $XDG_CACHE_HOME.")
    max_bytes: int = setting(
        32 << 30,
        "Blocks that were unused for longest are deleted beyond it; 0: never.",
        unit="bytes",
        validator=ge(0),
    )
    low_water_ratio: float = setting(
        0.9, "Deleting goes on until this share of max_bytes is left.", validator=and_(ge(0), le(1))
    )
    min_free_ratio: float = setting(
        0.05, "Nothing is saved to a disk with less than this share of it free.", validator=and_(ge(0), lt(1))
    )
    fsync: bool = setting(False, "Wait until each block is on the disk; without it a crash loses the latest.")
    trust_others: bool = setting(
        False, "Use a directory, and blocks, of other users: who can write there decides what is generated."
    )
