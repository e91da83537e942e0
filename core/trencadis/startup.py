"""Starting up: garbage collection that does not get in the way."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Final

__all__ = ["rare_collections"]

RARELY: Final = 50_000
"""Objects made, less those freed, between collections of the young: by default 700."""

_lock = threading.Lock()
_before: list[tuple[int, int, int]] = []
"""The thresholds as each of the contexts that are open now found them."""


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage rarely while a process loads, and as before afterwards; contexts may overlap in several threads.

    Loading makes hundreds of thousands of objects that stay, and each collection looks for garbage among them in vain: a sixth of the
    time that it takes to import torch and transformers.
    """
    with _lock:
        young, middle, old = gc.get_threshold()
        _before.append((young, middle, old))
        if young:  # 0: somebody has switched collections off
            gc.set_threshold(max(young, RARELY), middle, old)
    try:
        yield
    finally:
        with _lock:
            if len(_before) == 1:
                gc.set_threshold(*_before[0])
                _before.clear()
            else:
                _before.pop()
