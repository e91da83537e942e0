"""Config tables of the gallery's strategies."""

from __future__ import annotations

from typing import Any

import attrs
from attrs.validators import and_, deep_iterable, ge, gt, le, min_len

from trencadis.interfaces import setting
from trencadis_gallery.bucketing.workloads import DeviceCost
from trencadis_plugins.eviction.config import history_setting
from trencadis_plugins.scheduling.config import FcfsConfig

__all__ = ["FittedConfig", "MultiLevelConfig", "S3FifoConfig", "SlruConfig", "SyntheticConfig", "TwoQueueConfig"]


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
    history: float = history_setting(0.5)


@attrs.frozen(kw_only=True)
class S3FifoConfig:
    """Table ``[eviction.s3_fifo]``: shares of the cache. Source: Yang et al., SOSP 2023, section 4."""

    small_ratio: float = setting(0.1, "The cache's share of contents on probation.", validator=and_(ge(0.0), le(1.0)))
    history: float = history_setting(1.0)


@attrs.frozen(kw_only=True)
class MultiLevelConfig(FcfsConfig):
    """Table ``[scheduling.multi_level]``."""

    num_levels: int = setting(6, "Queues; each has twice the quantum of the one above.", unit="levels", validator=ge(1))
    quantum_tokens: int = setting(
        256, "Work of the first level: prompt and, weighted, output.", unit="tokens", validator=ge(1)
    )
    output_weight: float = setting(2.0, "Work of an output token, in prompt tokens.", validator=ge(0))
    quantum_ms: float = setting(
        0.0,
        "Work of the first level as time of the steps that a sequence runs in, instead of tokens; 0: tokens.",
        unit="ms",
        validator=ge(0),
    )
    starve_s: float = setting(20.0, "Waiting longer leads back to the first level.", unit="s", validator=gt(0))
    preempt: bool = setting(
        False, "Running sequences give way to waiting ones of a higher level: worth it only where recomputing is cheap."
    )


@attrs.frozen(kw_only=True)
class FittedConfig:
    """Table ``[bucketing.fitted]``: what the table is learnt from, and how large it may be.

    Limits hold together; 0 means no limit, and one of them is needed.
    """

    trace: str = setting("", "File to learn from: a trace or recorded shapes.")
    max_graphs: int = setting(64, "Most buckets of both phases; 0: no limit.", unit="buckets", validator=ge(0))
    max_compile_s: float = setting(
        0.0, "Longest estimated time to prepare the table; 0: no limit.", unit="s", validator=ge(0)
    )
    max_graph_bytes: float = setting(
        0.0, "Most estimated memory of all graphs; 0: no limit.", unit="bytes", validator=ge(0)
    )
    reserve_ratio: float = setting(
        0.02,
        "Weight of decode batches that the trace did not show, against those it did: loads change.",
        validator=and_(ge(0), le(1)),
    )
    cost: DeviceCost = attrs.field(factory=DeviceCost)


def _fits(config: Any, attribute: attrs.Attribute[float], value: float) -> None:
    if value and value < 1:
        raise ValueError(f"'{attribute.name}' must be 0, or at least 1: every step has one token. Got {value}.")


@attrs.frozen(kw_only=True)
class SyntheticConfig:
    """Table ``[acceptance.synthetic]``.

    Attributes:
        rates: Chance that the draft at each place stands if those before it do, 0 .. 1 each; the last holds for all further places.
        mean_tokens: Mean tokens of a step instead, 1 or more, if drafts enough are made; 0: go by ``rates``.
    """

    rates: tuple[float, ...] = setting(
        (0.8,),
        "Chance that the draft at each place stands if those before it do; the last is that of all further places.",
        validator=and_(min_len(1), deep_iterable(and_(ge(0.0), le(1.0)))),
    )
    mean_tokens: float = setting(
        0.0,
        "Mean tokens of a step, if so many drafts are made; 0: go by rates.",
        unit="tokens",
        validator=and_(ge(0.0), _fits),
    )

    def place_rates(self) -> tuple[float, ...]:
        """Return the rates of the places; at least one, the last for all further places. Pure.

        A mean of 3.4 is two drafts that always stand, one that does in four steps of ten, and none after it.
        """
        if not self.mean_tokens:
            return self.rates
        whole, part = divmod(self.mean_tokens - 1, 1)
        return (*[1.0] * int(whole), part, 0.0)
