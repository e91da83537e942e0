"""Lets a library do its work while it has some, on a thread that sleeps otherwise.

NIXL's own thread for this never sleeps: an engine that nobody writes to would pay a core for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

__all__ = ["ProgressThread"]

_NAP_S: Final = 1e-4


class ProgressThread:
    """Calls a function again and again while somebody needs it. From any thread; the thread starts with the first.

    Args:
        progress: The function; must not raise.
    """

    def __init__(self, progress: Callable[[], None]) -> None:
        self._progress = progress
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._num_users = 0
        self._is_closed = False

    def begin(self) -> None:
        """Count one who needs it."""
        with self._changed:
            self._num_users += 1
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="trencadis-nixl-pump", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def end(self) -> None:
        """Count one less."""
        with self._changed:
            self._num_users -= 1

    def close(self) -> None:
        """End the thread; the function does not run any more when this returns. May be called twice."""
        with self._changed:
            self._is_closed = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._num_users > 0 or self._is_closed)
                if self._is_closed:
                    return
            self._progress()
            time.sleep(_NAP_S)
