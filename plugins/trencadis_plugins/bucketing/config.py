"""Config tables of the built-in bucketing strategies."""

from __future__ import annotations

from typing import Any

import attrs
from attrs.validators import ge

__all__ = ["ExponentialConfig", "LinearConfig"]


def _size(help: str, *, unit: str, default: int = 0) -> Any:  # noqa: A002 - the word of the metadata
    return attrs.field(default=default, validator=ge(min(default, 0)), metadata={"help": help, "unit": unit})


@attrs.frozen(kw_only=True)
class ExponentialConfig:
    """Table ``[bucketing.exponential]``: how many sizes a dimension has; 0 derives the number from its range.

    A dimension from 1 to m has about log2(m) + 1 sizes by default. The largest size is always kept, and 0 or 1 beside
    the computed ones where a dimension starts there, unless its limit is 1.
    """

    limit: int = _size("Sizes in each dimension; 0: derived.", unit="sizes")
    prompt_bs_limit: int = _size("Batch sizes of prefill passes; 0: as limit.", unit="sizes")
    prompt_query_limit: int = _size("Query lengths of prefill passes; 0: as limit.", unit="sizes")
    prompt_ctx_limit: int = _size("Context sizes of prefill passes; 0: as limit.", unit="sizes")
    decode_bs_limit: int = _size("Batch sizes of decode passes; 0: as limit.", unit="sizes")
    decode_block_limit: int = _size("Block counts of decode passes; 0: as limit.", unit="sizes")


@attrs.frozen(kw_only=True)
class LinearConfig:
    """Table ``[bucketing.linear]``: smallest size, step and largest size of each dimension; 0 derives a value.

    Sizes double from ``min`` up to ``step`` and go on in multiples of ``step`` up to ``max``. A ``max`` above what the
    engine's limits allow is lowered to them.
    """

    prompt_bs_min: int = _size("Smallest batch of a prefill pass; 0: 1.", unit="sequences")
    prompt_bs_step: int = _size("Step of prefill batch sizes; 0: 1.", unit="sequences")
    prompt_bs_max: int = _size("Largest batch of a prefill pass; 0: the engine's.", unit="sequences")
    prompt_query_min: int = _size("Shortest query; 0: a block.", unit="tokens")
    prompt_query_step: int = _size("Step of query lengths; 0: a block.", unit="tokens")
    prompt_query_max: int = _size("Longest query; 0: the token budget.", unit="tokens")
    prompt_ctx_min: int = _size("Smallest context.", unit="blocks")
    prompt_ctx_step: int = _size("Step of context sizes; 0: 1.", unit="blocks")
    prompt_ctx_max: int = _size("Largest context; -1: what the longest sequence can have.", unit="blocks", default=-1)
    decode_bs_min: int = _size("Smallest batch of a decode pass; 0: 1.", unit="sequences")
    decode_bs_step: int = _size("Step of decode batch sizes; 0: 32.", unit="sequences")
    decode_bs_max: int = _size("Largest batch of a decode pass; 0: the engine's.", unit="sequences")
    decode_block_min: int = _size("Fewest blocks of a decode pass; 0: 1.", unit="blocks")
    decode_block_step: int = _size("Step of block counts; 0: the block size, read as a count.", unit="blocks")
    decode_block_max: int = _size("Most blocks of a decode pass; 0: what the longest sequences need.", unit="blocks")
