"""Config table of the strategy."""

from __future__ import annotations

import attrs
from attrs.validators import ge

__all__ = ["FibonacciConfig"]


@attrs.frozen(kw_only=True)
class FibonacciConfig:
    """Table ``[bucketing.fibonacci]``."""

    smallest_query: int = attrs.field(
        default=8,
        validator=ge(1),
        metadata={"help": "Shorter prompts are padded to this many tokens.", "unit": "tokens"},
    )
