"""Log lines of the command line: one format, on standard error, at the configured level.

A library does not configure logging; Python callers of ``LLM`` attach handlers to the logger ``trencadis`` themselves.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

__all__ = ["configure_logging"]

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _StderrHandler(logging.StreamHandler[Any]):
    """Writes to whatever ``sys.stderr`` is at the time, so that redirection after start-up is honoured."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure_logging(level: str) -> None:
    """Show messages of Trencadís from ``level`` up on standard error; a second call changes the level.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
    """
    logger = logging.getLogger("trencadis")
    logger.setLevel(level.upper())
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
        logger.addHandler(handler)
