"""Log lines of the command line: one format, on standard error, at the configured level.

A library does not configure logging; Python callers of ``LLM`` attach handlers to the logger ``trencadis`` themselves. Plugins of
others log under the names of their own packages, which the command line shows as well.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from trencadis.screen import write_line

__all__ = ["adopt_package", "configure_logging", "loading_level", "log_levels"]

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


_names = {"trencadis"}
"""Loggers that are shown."""
_level = ""
"""Of all of them; empty until the command line has said it."""
_loading_level = ""
"""In the place of ``_level`` while an engine loads."""
_num_loading = 0
_lock = threading.Lock()


class _StderrHandler(logging.Handler):
    """Writes to whatever ``sys.stderr`` is at the time, so that redirection after start-up is honoured."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            write_line(self.format(record))
        except Exception:
            self.handleError(record)


def configure_logging(level: str, *, loading: str | None = None) -> None:
    """Show messages of Trencadís from ``level`` up on standard error; a second call changes the level.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        loading: In its place while an engine loads; None: the same.
    """
    global _level, _loading_level
    with _lock:
        _level, _loading_level = level.upper(), (loading or level).upper()
        _show_all()


def log_levels() -> tuple[str, str]:
    """Return the level of messages while an engine loads and afterwards, for a process that shows the same."""
    if not _level:
        level = logging.getLevelName(logging.getLogger("trencadis").getEffectiveLevel()).lower()
        return level, level
    return _loading_level.lower(), _level.lower()


@contextlib.contextmanager
def loading_level() -> Iterator[None]:
    """Show the messages that are meant for loading during a ``with`` block; blocks of several threads may overlap."""
    global _num_loading  # noqa: PLW0603
    with _lock:
        _num_loading += 1
        _show_all()
    try:
        yield
    finally:
        with _lock:
            _num_loading -= 1
            _show_all()


def _show_all() -> None:
    if _level:
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
    logger.setLevel(_loading_level if _num_loading else _level)
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
        logger.addHandler(handler)
