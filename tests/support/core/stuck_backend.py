"""A backend whose first step never ends and never lets go of Python's lock."""

from __future__ import annotations

import re
from typing import Any

from support.core.paced_backend import VOCAB_SIZE
from trencadis_testing.fakes import FakeBackend

__all__ = ["StuckBackend"]


class StuckBackend(FakeBackend):
    """Matches an expression in a way that takes longer than anybody lives."""

    def __init__(self, **options: Any) -> None:
        super().__init__(vocab_size=VOCAB_SIZE, eos=-1, max_model_len=256, fails=match_catastrophically)


def match_catastrophically(*_: object) -> None:
    """Try all ways to divide a word into words, none of which ends as it should."""
    re.match(r"(a+)+$", "a" * 100 + "b")
