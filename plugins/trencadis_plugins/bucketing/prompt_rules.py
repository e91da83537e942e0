"""Constraints of models and kernels on query lengths of prefill passes, in addition to the limits of every engine.

Source: vllm-gaudi, extension/bucketing/common.py and exponential.py, rules of 2026.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import attrs
from attrs.validators import ge

from trencadis.errors import ConfigValueError
from trencadis.records import Bucket, BucketLimits

__all__ = ["PromptRules"]

_MIN_BASE = 32


def _tokens(default: int, help: str, *, least: int, **metadata: str) -> Any:  # noqa: A002 - the word of the metadata
    return attrs.field(default=default, validator=ge(least), metadata={"help": help, "unit": "tokens", **metadata})


@attrs.frozen(kw_only=True)
class PromptRules:
    """Table ``prompts`` of a strategy: which query lengths a prefill pass may have. None is ruled out by default.

    A model whose layers carry a state from chunk to chunk (Mamba) computes whole chunks. An attention kernel that works on
    slices of a long query asks for whole slices where there is no context.
    """

    query_chunk: int = _tokens(
        0, "Query lengths are multiples of it, for a model that computes whole chunks; 0: any.", least=0
    )
    slice_queries: bool = attrs.field(
        default=False,
        metadata={
            "help": "Long queries are whole slices, for an attention kernel that works on slices.",
            "unit": "",
            "aliases": "PT_HPU_SDPA_QKV_SLICE_MODE_FWD",
        },
    )
    slice_tokens: int = _tokens(1024, "Length of a slice.", least=1, aliases="PT_HPU_SDPA_BC_FACTOR")
    slice_threshold: int = _tokens(
        8192, "Queries from this length on are whole slices.", least=1, aliases="VLLM_FUSEDSDPA_SLIDE_THLD"
    )

    @property
    def fallback_base(self) -> int:
        """Fallback query lengths are multiples of it: 32, or as many chunks as reach it."""
        return self.query_chunk * -(-_MIN_BASE // self.query_chunk) if self.query_chunk else _MIN_BASE

    def check(self, limits: BucketLimits, table: str) -> None:
        """Check the rules against the token budget.

        Args:
            limits: Limits of a shape.
            table: Name of the strategy's config table, for the message.

        Raises:
            ConfigValueError: The token budget is not a whole number of chunks.
        """
        budget = limits.max_num_batched_tokens
        if self.query_chunk and budget % self.query_chunk:
            raise ConfigValueError(
                f"[{table}.prompts] query_chunk = {self.query_chunk}: engine.max_num_batched_tokens = {budget} is no "
                "multiple of it, so that the longest chunk of a prompt would be none of the model's.",
                hint=f"Set engine.max_num_batched_tokens to {-(-budget // self.query_chunk) * self.query_chunk}.",
            )

    def rounded(self, query_len: int) -> int:
        """Return the shortest query length that is allowed and no shorter. Pure; rounding twice changes nothing."""
        if self.query_chunk:
            query_len = -(-query_len // self.query_chunk) * self.query_chunk
        if self.slice_queries and query_len >= self.slice_threshold:
            unit = math.lcm(self.slice_tokens, self.query_chunk or 1)
            query_len = -(-query_len // unit) * unit
        return query_len

    def in_chunks(self, query_lens: Iterable[int]) -> list[int]:
        """Return query lengths rounded up to whole chunks, ascending and without duplicates. Pure."""
        chunk = self.query_chunk or 1
        return sorted({-(-query_len // chunk) * chunk for query_len in query_lens})

    def allows(self, bucket: Bucket) -> bool:
        """Whether a prefill bucket is prepared: a long query without context only if it is whole slices. Pure."""
        is_long = self.slice_queries and not bucket.num_blocks and bucket.query_len >= self.slice_threshold
        return not is_long or bucket.query_len % self.slice_tokens == 0
