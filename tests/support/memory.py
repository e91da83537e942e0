"""What the system says of this process's memory."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

__all__ = ["needs_statm", "resident_bytes"]

_STATM = Path("/proc/self/statm")
needs_statm = pytest.mark.skipif(not _STATM.exists(), reason="this system does not say how much memory is resident")


def resident_bytes() -> int:
    """Return the memory of this process that the system has given to it."""
    return int(_STATM.read_text().split()[1]) * resource.getpagesize()
