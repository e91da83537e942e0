"""Notices threads that are started again and again and never end: in the end a process can start none, and serves no more."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Final

__all__ = ["ENGINE_THREADS", "MOST_MORE", "ThreadWatch"]

MOST_MORE: Final = 64
"""More threads than at the start, above which there is a warning. The pools of a server are smaller."""

ENGINE_THREADS: Final = (
    "# HELP trencadis_engine_threads Threads that Python has started in the engine's process and that still run.\n"
    "# TYPE trencadis_engine_threads gauge\ntrencadis_engine_threads {}\n"
)
"""An engine's gauge in Prometheus' text format, without its number."""


class ThreadWatch:
    """Counts the threads of this process, and warns once when they have become many more than there were.

    Args:
        logger: Gets the warning.
        process: Name of the process, for the warning.
    """

    def __init__(self, logger: logging.Logger, process: str) -> None:
        self._logger = logger
        self._process = process
        self._fewest = threading.active_count()
        self._has_warned = False

    def look(self) -> int:
        """Return how many threads Python has started that still run; warns if they are too many. Microseconds."""
        number = threading.active_count()
        self._fewest = min(self._fewest, number)
        if number > self._fewest + MOST_MORE and not self._has_warned:
            self._has_warned = True
            self._warn(number)
        return number

    def _warn(self, number: int) -> None:
        threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
        (module, most), *_ = Counter(map(_module_of, threads)).most_common(1)
        name = next((thread.name for thread in threads if _module_of(thread) == module), "")
        self._logger.warning(
            "%s has %d threads, %d more than at its start, and %d of them run code of %s, such as %r: they are started and do not "
            "end. When no more can be started, the process ends. Upgrade or remove the plugin or library that %s belongs to.",
            self._process,
            number,
            number - self._fewest,
            most,
            module,
            name,
            module,
        )


def _module_of(thread: threading.Thread) -> str:
    """Return the module of the code that a thread runs. Pure."""
    target = getattr(thread, "_target", None)  # there is no other face; a thread of another class has a method for it
    if target is None:
        return type(thread).__module__
    owner = getattr(target, "__self__", None)
    return str(getattr(target, "__module__", None) or type(target if owner is None else owner).__module__)
