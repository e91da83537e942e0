"""Log lines of the command line: one format, on standard error, at the configured level.

A library does not configure logging; Python callers of ``LLM`` attach handlers to the logger ``trencadis`` themselves. Plugins of
others log under the names of their own packages, which the command line shows as well.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

__all__ = ["adopt_package", "configure_logging"]

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


_names = {"trencadis"}
"""Loggers that are shown."""
_level = ""
"""Of all of them; empty until the command line has said it."""


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
    global _level  # noqa: PLW0603 - loggers are global as well
    _level = level.upper()
    for name in _names:
        _show(name)


def adopt_package(module: str) -> None:
    """Show messages of the package that a plugin comes from as those of Trencadís, if the command line shows these.

    Args:
        module: Of the plugin; its outermost package names the logger.
    """
    name = module.partition(".")[0]
    if name not in _names:
        _names.add(name)
        if _level:
            _show(name)


def _show(name: str) -> None:
    logger = logging.getLogger(name)
    logger.setLevel(_level)
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
        logger.addHandler(handler)
