"""How glibc's malloc holds memory in the engine's process: in few heaps, so that what one thread frees another can use.

By default each thread gets a heap of its own, up to eight times the number of cores. What the largest request of each thread took stays
in its heap, in pieces between what still lives. See docs/decisions/0054-the-engine-has-two-heaps.md.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

__all__ = ["NUM_HEAPS", "share_heaps"]

NUM_HEAPS: Final = 2
"""One that the loop of the engine rarely has to wait for, while another thread compiles a grammar."""

_M_ARENA_MAX: Final = -8


def share_heaps() -> bool:
    """Have all threads of this process share ``NUM_HEAPS`` heaps; call it before any thread is started. Source: mallopt(3).

    Returns:
        False: malloc is not glibc's, or the environment says how many.
    """
    if "MALLOC_ARENA_MAX" in os.environ or "glibc.malloc.arena_max" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    return bool(libc.mallopt(_M_ARENA_MAX, NUM_HEAPS))
