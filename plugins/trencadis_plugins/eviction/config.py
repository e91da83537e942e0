"""Config tables of the built-in eviction policies."""

from __future__ import annotations

from typing import Any

import attrs
from attrs.validators import ge, gt

from trencadis.interfaces import setting

__all__ = ["CostAwareConfig", "LfuConfig", "TtlConfig", "history_setting"]


def history_setting(default: float) -> Any:
    """Return the field for the length of a policy's memory of evicted contents."""
    return setting(default, "Evicted contents to remember, as a multiple of the cache; 0: none.", validator=ge(0.0))


@attrs.frozen(kw_only=True)
class LfuConfig:
    """Table ``[eviction.lfu]``: how long a use counts.

    The defaults were chosen on the first 15 minutes of the Mooncake conversation trace, with caches of 3,000 and 10,000 blocks.
    """

    half_life_s: float = setting(300.0, "A use counts half after so long; 0: for ever.", unit="s", validator=ge(0.0))
    history: float = history_setting(4.0)


@attrs.frozen(kw_only=True)
class CostAwareConfig:
    """Table ``[eviction.cost_aware]``: what a block is worth."""

    attention_blocks: int = setting(
        0,
        "Depth at which attention costs as much as the weights; 0: attention is left out.",
        unit="blocks",
        validator=ge(0),
    )
    history: float = history_setting(4.0)


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
