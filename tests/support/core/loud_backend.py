"""Devices that write at the wrong moment, and models that never load: what a terminal must bear."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

from support.core.paced_backend import VOCAB_SIZE
from trencadis.records import ModelFacts
from trencadis_testing.fakes import FakeBackend

logger = logging.getLogger("trencadis.loud")

WORDS = "A warning that is longer than one line of a terminal of eighty columns is wide, and belongs to step"


class LoudBackend(FakeBackend):
    """A fake backend for the demo's tokenizer that warns while it loads and with each pass.

    Args:
        max_model_len: The "model's" own limit.
        writes: Write to the file of standard error as well, as libraries do that are not Python's.
        layout: As of the fake backend.
    """

    def __init__(self, max_model_len: int = 256, writes: bool = False, layout: str = "ragged") -> None:
        self._steps = 0
        self._writes = writes

        def warn(*_: object) -> None:
            self._steps += 1
            self._warn(f"{WORDS} {self._steps}.")

        super().__init__(
            vocab_size=VOCAB_SIZE, eos=-1, max_model_len=max_model_len, strict=False, fails=warn, layout=layout
        )

    def _warn(self, words: str) -> None:
        logger.warning(words)
        if self._writes:
            os.write(2, b"Words of a library.\n")

    def load(self, source: Any, **others: Any) -> ModelFacts:
        """Warn and load."""
        self._warn("A warning while it loads.")
        return super().load(source, **others)


class EndlessBackend(FakeBackend):
    """A model that is never loaded."""

    def __init__(self) -> None:
        super().__init__(vocab_size=VOCAB_SIZE, eos=-1)

    def load(self, source: Any, **others: Any) -> ModelFacts:
        """Return never."""
        threading.Event().wait()
        raise AssertionError
