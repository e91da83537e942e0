"""How the C library's heap serves a process whose large blocks live as long as a request."""

from __future__ import annotations

import ctypes

__all__ = ["give_back_large_blocks"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGE_BYTES = 1 << 18
_KEPT_BYTES = 1 << 20
_MAX_ARENAS = 2


def give_back_large_blocks() -> bool:
    """Let bodies and answers go back to the system as soon as they are freed; False where the C library is not glibc.

    By default glibc raises the size from which on a block is mapped by itself to that of the largest block freed so far, up to 32 MiB:
    after one long answer all others lie in heaps, which shrink from their ends only, and of heaps it makes eight for each core. To
    be called before there are threads.

    Source: mallopt(3), M_MMAP_THRESHOLD and M_ARENA_MAX.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    options = ((_M_MMAP_THRESHOLD, _LARGE_BYTES), (_M_TRIM_THRESHOLD, _KEPT_BYTES), (_M_ARENA_MAX, _MAX_ARENAS))
    return bool(min(mallopt(name, value) for name, value in options))
