"""Config table of the connector over LMCache."""

from __future__ import annotations

from typing import Final

import attrs
from attrs.validators import and_, ge, gt, le

from trencadis.interfaces import setting
from trencadis_kv.store.settings import StoreSettings

__all__ = ["LMCacheConfig"]

_REFUSED: Final = "resp"


def _is_url(_: object, attribute: attrs.Attribute[str], url: str) -> None:
    scheme, separator, rest = url.partition("://")
    if url and not (scheme and separator and rest):
        raise ValueError(f"{attribute.name} must be a URL such as redis://host:6379, got {url!r}")
    if scheme == _REFUSED:
        raise ValueError(
            f"{attribute.name} = {url!r}: LMCache's client for resp:// hung in most trials; use redis:// with the same server"
        )


@attrs.frozen(kw_only=True)
class LMCacheConfig(StoreSettings):
    """Table ``[kv_connector.lmcache]``: where LMCache keeps objects, and the memory that they go through."""

    remote_url: str = setting(
        "",
        "LMCache's remote store, such as redis://host:6379 or fs://localhost:0/path; empty: this process's memory alone.",
        validator=_is_url,
    )
    local_bytes: int = setting(1 << 30, "Host memory that LMCache takes, at once.", unit="bytes", validator=ge(1 << 20))
    start_timeout_s: float = setting(
        60.0,
        "The longest that the store is tried at start-up; importing LMCache takes seconds of it.",
        unit="s",
        validator=and_(gt(0), le(600)),
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
