"""Environment names of the vLLM plugin for Gaudi for the keys of sizes, so that an existing deployment keeps its buckets.

Source: vllm-gaudi, extension/bucketing/linear.py and padding_aware.py; the LIMIT names, exponential.py of July 2025.
"""

from __future__ import annotations

import re
from typing import Any

import attrs

__all__ = ["vendor_names"]

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
    words = (dimension, "SEQ") if dimension == "QUERY" and not bound.startswith("PAD") else (dimension,)
    names = tuple(f"VLLM_{phase}_{word}_BUCKET_{bound}" for word in words)
    return field.evolve(metadata={**field.metadata, "aliases": names})
