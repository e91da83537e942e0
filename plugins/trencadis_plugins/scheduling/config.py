"""Config tables of the built-in scheduling policies."""

from __future__ import annotations

from typing import Any

import attrs
from attrs.validators import ge

__all__ = ["FcfsConfig"]


def _tokens(help: str) -> Any:  # noqa: A002 - the word of the metadata
    return attrs.field(default=0, validator=ge(0), metadata={"help": help, "unit": "tokens"})


@attrs.frozen(kw_only=True)
class FcfsConfig:
    """Table ``[scheduling.fcfs]``: how far prompts may slow decodes down."""

    max_prefill_tokens: int = _tokens("Most prompt tokens of a step, all sequences together; 0: the token budget.")
    long_prefill_threshold: int = _tokens("Most tokens of one prompt in a step; 0: the token budget.")
