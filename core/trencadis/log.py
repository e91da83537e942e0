"""Log lines of the command line: one format, on standard error, at the configured level.

    record ▶ text | a JSON object | text with the priority that journald reads ▶ one write

What is logged with ``extra={"fields": {...}}`` has these fields in the JSON object.

A library does not configure logging; Python callers of ``LLM`` attach handlers to the logger ``trencadis`` themselves. Plugins of
others log under the names of their own packages, which the command line shows as well.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import threading
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from trencadis.screen import write_line

__all__ = ["FORMATS", "adopt_package", "configure_logging", "loading_level", "log_levels", "say"]

FORMATS = ("text", "json", "journal")
"""Values of ``log.format``."""

_LINE = "%(levelname)s %(name)s: %(message)s"
_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
"""Priorities of syslog, by the least level that has one; source: sd-daemon(3)."""
_DEBUG_PRIORITY = 7


_names = {"trencadis"}
"""Loggers that are shown."""
_level = ""
"""Level of all loggers; empty until the command line has said it."""
_loading_level = ""
"""In the place of ``_level`` while an engine loads."""
_num_loading = 0
_lock = threading.Lock()
_format = "text"


class _StderrHandler(logging.Handler):
    """Writes to whatever ``sys.stderr`` is at the time, so that redirection after start-up is honoured."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            write_line(self.format(record))
        except Exception:
            self.handleError(record)


class _JsonFormatter(logging.Formatter):
    """Writes a record as a JSON object in one line."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "process": record.process,
        }
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        line |= {name: value for name, value in fields.items() if name not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _JournalFormatter(logging.Formatter):
    """Writes the priority before each line, and no time, which the journal has."""

    def format(self, record: logging.LogRecord) -> str:
        priority = next((number for level, number in _PRIORITIES if record.levelno >= level), _DEBUG_PRIORITY)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines())


def configure_logging(level: str, form: str = "text", *, loading: str | None = None) -> None:
    """Show messages of Trencadís from ``level`` up on standard error; a second call changes level and format.

    Warnings of other libraries are shown in the same format, where these have no handler of their own.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        form: One of ``FORMATS``.
        loading: Level while an engine loads; None: the same.
    """
    global _format, _level, _loading_level
    with _lock:
        _level, _loading_level, _format = level.upper(), (loading or level).upper(), form
        _show_all()
        others = _StderrHandler()
        others.setLevel(logging.WARNING)
        others.setFormatter(_formatter())
        logging.lastResort = others
        if form == "json":
            logging.captureWarnings(True)
            _show("py.warnings")


def say(line: str, level: int = logging.INFO, *, stream: TextIO | None = None) -> None:
    """Write a line for people; where the log is for programs, log it, so that they read one format.

    Args:
        line: Without the line break at its end.
        level: In the log.
        stream: Where people read it; None: standard error.
    """
    if _format == "text":
        write_line(line, stream=stream)
    else:
        logging.getLogger("trencadis").log(level, "%s", line)


def _formatter() -> logging.Formatter:
    match _format:
        case "json":
            return _JsonFormatter()
        case "journal":
            return _JournalFormatter(_LINE)
        case _:
            return logging.Formatter(f"%(asctime)s {_LINE}", datefmt="%Y-%m-%d %H:%M:%S")


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
        module: Module of the plugin; its outermost package names the logger.
    """
    name = module.partition(".")[0]
    if name not in _names:
        _names.add(name)
        if _level:
            _show(name)


def _show(name: str) -> None:
    logger = logging.getLogger(name)
    logger.setLevel(_loading_level if _num_loading else _level)
    handlers = [handler for handler in logger.handlers if isinstance(handler, _StderrHandler)]
    if not handlers:
        handlers = [_StderrHandler()]
        logger.addHandler(handlers[0])
    for handler in handlers:
        handler.setFormatter(_formatter())
