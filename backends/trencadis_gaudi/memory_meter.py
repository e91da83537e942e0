"""What a part of the start-up takes of device and host, in the vendor plugin's words.

Source: the log lines of vllm-gaudi: used over a span of the start-up, and used of all there is after it.
"""

from __future__ import annotations

import gc
import os

import attrs

from trencadis_gaudi.habana import Habana
from trencadis_gaudi.memory import format_bytes

__all__ = ["MemoryMeter", "MemoryUse", "host_memory"]

_MEMINFO = "/proc/meminfo"


@attrs.frozen
class MemoryUse:
    """Memory in use at a moment, and all there is; bytes."""

    device_bytes: int
    device_total_bytes: int
    host_bytes: int
    host_total_bytes: int

    @classmethod
    def of(cls, habana: Habana) -> MemoryUse:
        """Measure, after what nobody refers to was freed; the emulated device keeps books that do not depend on that."""
        if habana.emulated is None:
            gc.collect()
        free, total = habana.hpu.mem_get_info()
        return cls(total - free, total, *host_memory())


class MemoryMeter:
    """Measures from its making on.

    Args:
        habana: The device.
    """

    def __init__(self, habana: Habana) -> None:
        self._habana = habana
        self._before = MemoryUse.of(habana)

    def summary(self) -> str:
        """Return what was taken since, and what is in use."""
        now, before = MemoryUse.of(self._habana), self._before
        return (
            f"{format_bytes(now.device_bytes - before.device_bytes)} of device memory "
            f"({format_bytes(now.device_bytes)}/{format_bytes(now.device_total_bytes)} used) and "
            f"{format_bytes(now.host_bytes - before.host_bytes)} of host memory "
            f"({format_bytes(now.host_bytes)}/{format_bytes(now.host_total_bytes)} used)"
        )


def host_memory(path: str = _MEMINFO) -> tuple[int, int]:
    """Return what is in use on the host, and the total, bytes.

    Args:
        path: Where Linux says it; where it does not, free pages stand for available ones.
    """
    try:
        with open(path, encoding="ascii") as lines:
            fields = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        total, available = fields["MemTotal"], fields["MemAvailable"]
    except (OSError, KeyError, ValueError):
        page = os.sysconf("SC_PAGE_SIZE")
        total, available = os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
    return total - available, total
