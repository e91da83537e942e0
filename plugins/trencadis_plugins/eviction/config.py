"""Config tables of the built-in eviction policies."""

from __future__ import annotations

from typing import Any

import attrs
from attrs.validators import and_, ge, gt, le

from trencadis.interfaces import setting

__all__ = ["CostAwareConfig", "LfuConfig", "S3FifoConfig", "SlruConfig", "TtlConfig", "TwoQueueConfig"]


def _history(default: float) -> Any:
    return setting(default, "Evicted contents to remember, as a multiple of the cache; 0: none.", validator=ge(0.0))


@attrs.frozen(kw_only=True)
class LfuConfig:
    """Table ``[eviction.lfu]``: how long a use counts.

    The defaults were chosen on the first 15 minutes of the Mooncake conversation trace, with caches of 3,000 and 10,000 blocks.
    """

    half_life_s: float = setting(300.0, "A use counts half after so long; 0: for ever.", unit="s", validator=ge(0.0))
    history: float = _history(4.0)


@attrs.frozen(kw_only=True)
class SlruConfig:
    """Table ``[eviction.slru]``: which blocks are protected."""

    protected_uses: int = setting(
        2, "A block used so often is protected: others go first.", unit="uses", validator=ge(1)
    )
    protected_ratio: float = setting(
        0.8, "Most of the cache that is protected; 1: all of it.", validator=and_(ge(0.0), le(1.0))
    )


@attrs.frozen(kw_only=True)
class TwoQueueConfig:
    """Table ``[eviction.two_queue]``: shares of the cache. Source: Johnson and Shasha, VLDB 1994, section 3.3."""

    new_ratio: float = setting(0.25, "The cache's share of contents on probation.", validator=and_(ge(0.0), le(1.0)))
    history: float = _history(0.5)


@attrs.frozen(kw_only=True)
class S3FifoConfig:
    """Table ``[eviction.s3_fifo]``: shares of the cache. Source: Yang et al., SOSP 2023, section 4."""

    small_ratio: float = setting(0.1, "The cache's share of contents on probation.", validator=and_(ge(0.0), le(1.0)))
    history: float = _history(1.0)


@attrs.frozen(kw_only=True)
class CostAwareConfig:
    """Table ``[eviction.cost_aware]``: what a block is worth."""

    attention_blocks: int = setting(
        0,
        "Depth at which attention costs as much as the weights; 0: attention is left out.",
        unit="blocks",
        validator=ge(0),
    )
    history: float = _history(4.0)


@attrs.frozen(kw_only=True)
class TtlConfig:
    """Table ``[eviction.ttl]``: prefixes that stay, named by the cache salt of the requests that bring them.

    A salt names itself and every salt under it: ``key-a`` also ``key-a/user`` and, of the server's ``cache_salt``, ``key-a`` with
    anything after a NUL character.
    """

    pinned_salts: tuple[str, ...] = attrs.field(
        factory=tuple, metadata={"help": "Cache salts (tenants) whose prefixes are pinned.", "unit": ""}
    )
    pinned_blocks: int = setting(
        64, "So many blocks from a prompt's start are pinned; 0: all.", unit="blocks", validator=ge(0)
    )
    pinned_s: float = setting(3600.0, "How long after its last use a block stays pinned.", unit="s", validator=gt(0.0))
