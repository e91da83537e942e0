"""Config tables of the routers."""

from __future__ import annotations

import attrs
from attrs.validators import and_, ge, le

from trencadis.interfaces import setting

__all__ = ["CacheAwareConfig", "PrefixAffinityConfig"]


def _abs_threshold() -> int:
    value: int = setting(
        32,
        "Loads are balanced while the largest is at most so many requests above the smallest.",
        unit="requests",
        validator=ge(0),
    )
    return value


def _rel_threshold(default: float) -> float:
    value: float = setting(
        default, "Loads are balanced while the largest is at most so many times the smallest.", validator=ge(1)
    )
    return value


@attrs.frozen(kw_only=True)
class PrefixAffinityConfig:
    """Table ``[router.prefix_affinity]``.

    Attributes:
        prefix_weight: Weight of having the whole prompt.
        load_weight: Weight of the mean load, against that.
        balance_abs_threshold: See the help.
        balance_rel_threshold: See the help; beyond both thresholds prefixes do not count.
    """

    prefix_weight: float = setting(2.0, "What having the whole prompt in the cache counts for.", validator=ge(0))
    load_weight: float = setting(1.0, "What the mean load of all replicas counts for, against that.", validator=ge(0))
    balance_abs_threshold: int = _abs_threshold()
    balance_rel_threshold: float = _rel_threshold(1.5)


@attrs.frozen(kw_only=True)
class CacheAwareConfig:
    """Table ``[router.cache_aware]``. The defaults are those of SGLang's router.

    Source: sgl-model-gateway, ``src/policies/cache_aware.rs``, ``CacheAwareConfig``.

    Attributes:
        cache_threshold: See the help.
        balance_abs_threshold: See the help.
        balance_rel_threshold: See the help; beyond both thresholds the least loaded replica is chosen.
        max_tree_tokens: See the help.
    """

    cache_threshold: float = setting(
        0.5,
        "A replica that had more than this share of the prompt takes it.",
        unit="ratio",
        validator=and_(ge(0), le(1)),
    )
    balance_abs_threshold: int = _abs_threshold()
    balance_rel_threshold: float = _rel_threshold(1.1)
    max_tree_tokens: int = setting(
        1_000_000,
        "Tokens that the tree holds of each replica; the least recently used go first.",
        unit="tokens",
        validator=ge(1),
    )
