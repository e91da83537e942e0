"""Config tables of the built-in bucketing strategies.

Source: vllm-gaudi, extension/bucketing/linear.py and padding_aware.py; the LIMIT names, exponential.py of July 2025.
"""

from __future__ import annotations

import re
from typing import Any

import attrs
from attrs.validators import and_, ge, in_, le

from trencadis.interfaces import setting
from trencadis_plugins.bucketing.prompt_rules import PromptRules

__all__ = ["ExponentialConfig", "FromFileConfig", "LinearConfig", "PaddingAwareConfig", "UnifiedConfig", "vendor_names"]


_KEY = re.compile(r"(prompt|decode)_(bs|query|ctx|block)_(min|step|max|limit|pad_max|pad_percent)")


def vendor_names(_: type[Any], fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    """Give each field of a size its environment name; a ``field_transformer`` of attrs classes. Pure.

    ``prompt_bs_min`` is ``VLLM_PROMPT_BS_BUCKET_MIN``. Query lengths have an older name beside it, with SEQ.
    """
    return [_named(field) for field in fields]


def _named(field: attrs.Attribute[Any]) -> attrs.Attribute[Any]:
    match = _KEY.fullmatch(field.name)
    if match is None:
        return field
    phase, dimension, bound = (part.upper() for part in match.groups())
    words = (dimension, "SEQ") if dimension == "QUERY" else (dimension,)
    names = tuple(f"VLLM_{phase}_{word}_BUCKET_{bound}" for word in words)
    return field.evolve(metadata={**field.metadata, "aliases": names})


def _size(help: str, *, unit: str, default: int = 0) -> Any:  # noqa: A002 - the word of the metadata
    return setting(default, help, unit=unit, validator=ge(min(default, 0)))


def _choice(help: str, *choices: str) -> Any:  # noqa: A002
    """One of the choices; the first is the default."""
    return setting(choices[0], help, validator=in_(list(choices)))


def _percent(help: str) -> Any:  # noqa: A002
    return setting(25, help, unit="percent", validator=and_(ge(0), le(50)))


def _switch(help: str, *, default: bool) -> Any:  # noqa: A002
    return setting(default, help)


def _is_one(text: str) -> Any:
    """Any other least query is nothing to this strategy. Source: vllm-gaudi, extension/bucketing/exponential.py."""
    return True if text.strip() == "1" else attrs.NOTHING


def _flat_drafts() -> Any:
    return _switch(
        "Decode passes with drafts have a row for each token, for a backend that flattens them; else a longer query.",
        default=False,
    )


@attrs.frozen(kw_only=True, field_transformer=vendor_names)
class ExponentialConfig:
    """Table ``[bucketing.exponential]``: how many sizes a dimension has; 0 derives the number from its range.

    A dimension from 1 to m has about log2(m) + 1 sizes by default. The largest size is always kept, and 0 or 1 beside
    the computed ones where a dimension starts there, unless its limit is 1. The generation 2025-07 fills coinciding sizes
    up with unused ones, lists every context that fits the token budget, and leaves no decode combination out.
    """

    generation: str = _choice("Whose rules: of August 2026, or the filling ones of July 2025.", "2026-08", "2025-07")
    limit: int = _size("Sizes in each dimension; 0: derived.", unit="sizes")
    prompt_bs_limit: int = _size("Batch sizes of prefill passes; 0: as limit.", unit="sizes")
    prompt_query_limit: int = _size("Query lengths of prefill passes; 0: as limit.", unit="sizes")
    prompt_ctx_limit: int = _size("Context sizes of prefill passes; 0: as limit. Not for 2025-07.", unit="sizes")
    decode_bs_limit: int = _size("Batch sizes of decode passes; 0: as limit.", unit="sizes")
    decode_block_limit: int = _size("Block counts of decode passes; 0: as limit.", unit="sizes")
    clamp_decode_blocks: bool = _switch(
        "Decode passes over listed blocks are prepared for at most three times the cache. Not for 2025-07.",
        default=True,
    )
    prompt_ctx_max: int = _size(
        "A long model's context fills it up only to fewer blocks; -1: any. Not for 2025-07.", unit="blocks", default=-1
    )
    single_token_prompts: bool = setting(
        False,
        "Also a query of 1, for an engine that decodes what another one prefilled. Not for 2025-07.",
        aliases={"VLLM_PROMPT_QUERY_BUCKET_MIN": _is_one},
    )
    flat_drafts: bool = _flat_drafts()
    prompts: PromptRules = attrs.field(factory=PromptRules)

    def __attrs_post_init__(self) -> None:
        """Refuse what the older generation does not know."""
        if self.generation != "2025-07":
            return
        newer = ("prompt_ctx_limit", "clamp_decode_blocks", "prompt_ctx_max", "single_token_prompts", "prompts")
        default = ExponentialConfig()
        for key in newer:
            if getattr(self, key) != getattr(default, key):
                raise ValueError(f'{key} has no meaning with generation = "2025-07"')


@attrs.frozen(kw_only=True, field_transformer=vendor_names)
class LinearConfig:
    """Table ``[bucketing.linear]``: smallest size, step and largest size of each dimension; 0 derives a value.

    Sizes double from ``min`` up to ``step`` and go on in multiples of ``step`` up to ``max``. A ``max`` above what the
    engine's limits allow is lowered to them, a ``decode_block_min`` above ``decode_block_max`` to a step below it. With merged
    prefill a batch is one row, queries have four times the step and the token budget as ``max``. The log says what changes.
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
    flat_drafts: bool = _flat_drafts()
    prompts: PromptRules = attrs.field(factory=PromptRules)


@attrs.frozen(kw_only=True, field_transformer=vendor_names)
class PaddingAwareConfig:
    """Table ``[bucketing.padding_aware]``: as ``[bucketing.linear]``, with a bound on padding for each dimension.

    Sizes double from ``min`` up to ``step``. From there a multiple of ``step`` is kept where padding would otherwise exceed
    ``pad_max``, or ``pad_percent`` of the padded size. ``max`` is always kept. A ``decode_block_min`` above the blocks of the
    cache is lowered to a step below them.
    """

    prompt_bs_min: int = _size("Smallest batch of a prefill pass; 0: 1.", unit="sequences")
    prompt_bs_step: int = _size("Step of prefill batch sizes; 0: 1.", unit="sequences")
    prompt_bs_max: int = _size("Largest batch of a prefill pass; 0: the engine's.", unit="sequences")
    prompt_bs_pad_max: int = _size("Most added sequences; 0: any; -1: a quarter of most.", unit="sequences", default=-1)
    prompt_bs_pad_percent: int = _percent("Most added sequences, of the padded batch.")
    prompt_query_min: int = _size("Shortest query; 0: a block.", unit="tokens")
    prompt_query_step: int = _size("Step of query lengths; 0: a block.", unit="tokens")
    prompt_query_max: int = _size("Longest query; 0: the token budget.", unit="tokens")
    prompt_query_pad_max: int = _size(
        "Most added tokens; 0: any; -1: a quarter of the budget.", unit="tokens", default=-1
    )
    prompt_query_pad_percent: int = _percent("Most added tokens, of the padded query.")
    prompt_ctx_min: int = _size("Smallest context.", unit="blocks")
    prompt_ctx_step: int = _size("Step of context sizes; 0: 2.", unit="blocks")
    prompt_ctx_max: int = _size("Largest context; -1: what the longest sequence can have.", unit="blocks", default=-1)
    prompt_ctx_pad_max: int = _size(
        "Most added context; 0: any; -1: the token budget's blocks.", unit="blocks", default=-1
    )
    prompt_ctx_pad_percent: int = _percent("Most added context, of the padded one.")
    decode_bs_min: int = _size("Smallest batch of a decode pass; 0: 1.", unit="sequences")
    decode_bs_step: int = _size("Step of decode batch sizes; 0: 2.", unit="sequences")
    decode_bs_max: int = _size("Largest batch of a decode pass; 0: the engine's.", unit="sequences")
    decode_bs_pad_max: int = _size("Most added sequences; 0: any; -1: a quarter of most.", unit="sequences", default=-1)
    decode_bs_pad_percent: int = _percent("Most added sequences, of the padded batch.")
    decode_block_min: int = _size("Fewest blocks; 0: the block size, read as a count.", unit="blocks")
    decode_block_step: int = _size("Step of block counts; 0: the block size, read as a count.", unit="blocks")
    decode_block_max: int = _size("Most blocks of a decode pass; 0: what the longest sequences need.", unit="blocks")
    decode_block_pad_max: int = _size("Most added blocks; 0: any; -1: a quarter of most.", unit="blocks", default=-1)
    decode_block_pad_percent: int = _percent("Most added blocks, of the padded count.")
    flat_drafts: bool = _flat_drafts()
    prompts: PromptRules = attrs.field(factory=PromptRules)


@attrs.frozen(kw_only=True)
class UnifiedConfig:
    """Table ``[bucketing.unified]``: the sizes that unified attention has, in each dimension of a pass; for any layout with buckets.

    ``exponential`` takes ten sizes in geometric progression, rounded up to multiples of the most sequences. ``alpha`` takes a
    quarter, a half and the whole of a dimension's largest size and of the most sequences.
    """

    form: str = _choice("How sizes are made.", "exponential", "alpha")
    flat_drafts: bool = _flat_drafts()


@attrs.frozen(kw_only=True)
class FromFileConfig:
    """Table ``[bucketing.from_file]``: which file lists the buckets.

    A line is ``(batch size, query length, blocks)``; each of the three may also be a list or ``range(start, stop, step)``. A
    query of one token means decode. An invalid line is skipped with a warning.
    """

    path: str = attrs.field(metadata={"help": "The file.", "unit": "", "aliases": "VLLM_BUCKETING_FROM_FILE"})
    strict: bool = _switch("Refuse a file with an invalid line.", default=False)
    phases: str = _choice(
        "Which phases must have a bucket; the other one may run in fallbacks.", "both", "prefill", "decode"
    )
    flat_drafts: bool = _flat_drafts()

    @path.validator
    def _check_path(self, attribute: attrs.Attribute[str], path: str) -> None:
        if not path:
            raise ValueError("must name a file")
