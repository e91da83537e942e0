"""Division of a Gaudi's memory, and log lines of the memory used by each part of the start-up.

    free after loading and the profile run
    ├─ margin           free · (1 − utilization)     never given away: run-time peaks
    └─ usable           free · utilization
       ├─ graphs        usable · reserve              recipes and their workspaces
       └─ KV cache      usable · (1 − reserve)        of which one block is the padding block

Source: vllm-gaudi, v1/worker/hpu_worker.py, determine_available_memory; the log lines, here and where each fact is known, are those of
the run in its docs/features/warmup.md (091bbadd): memory used over a span of the start-up, and used of the total after it.
"""

from __future__ import annotations

import gc
import os

import attrs

from trencadis.errors import OutOfMemoryError
from trencadis_gaudi.habana import Habana

__all__ = ["MemoryShares", "format_bytes", "share_memory", "MemoryMeter", "MemoryUse", "host_memory"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@attrs.frozen(kw_only=True)
class MemoryShares:
    """Division of a device's memory, bytes.

    Attributes:
        free_bytes: Memory free after loading and the profile run.
        usable_bytes: Memory for graphs and KV cache together.
        margin_bytes: Memory that stays free.
        graph_bytes: Memory for graphs.
        kv_bytes: Memory for the KV cache, including the padding block.
        padding_bytes: Memory of the padding block over all layers.
        utilization: Share of the free memory that is usable, above 0 to 1.
        graph_reserve: Share of the usable memory for graphs, 0 to below 1.
    """

    free_bytes: int
    usable_bytes: float
    margin_bytes: float
    graph_bytes: float
    kv_bytes: float
    padding_bytes: int
    utilization: float
    graph_reserve: float

    @property
    def cache_bytes(self) -> int:
        """Memory for KV blocks without the padding block, bytes."""
        return int(self.kv_bytes - self.padding_bytes)

    def num_blocks(self, block_bytes: int) -> int:
        """Return the number of KV blocks of ``block_bytes`` that fit. Pure.

        Raises:
            OutOfMemoryError: No block fits.
        """
        count = self.cache_bytes // block_bytes
        if count < 1:
            raise OutOfMemoryError(
                f"{format_bytes(self.cache_bytes)} for the KV cache do not pay for one block of "
                f"{format_bytes(block_bytes)}: {self}.",
                hint="Raise backend.gaudi.memory_utilization, lower backend.gaudi.graph_reserve, or shorten the model's "
                "context.",
            )
        return count

    def __str__(self) -> str:
        """Return the vendor plugin's log line."""
        return (
            f"Free device memory: {format_bytes(self.free_bytes)}, {format_bytes(self.usable_bytes)} usable "
            f"(gpu_memory_utilization={self.utilization:g}), {format_bytes(self.graph_bytes)} reserved for HPUGraphs "
            f"(VLLM_GRAPH_RESERVED_MEM={self.graph_reserve:g}), {format_bytes(self.padding_bytes)} reserved for KV cache "
            f"dummy block {format_bytes(self.kv_bytes - self.padding_bytes)} reserved for usable KV cache"
        )


def share_memory(free_bytes: int, *, utilization: float, graph_reserve: float, padding_bytes: int = 0) -> MemoryShares:
    """Divide a device's memory. Pure.

    Args:
        free_bytes: Memory free after loading and the profile run, bytes.
        utilization: Share of the free memory to use, above 0 to 1.
        graph_reserve: Share of the usable memory for graphs, 0 to below 1; 0 without captured graphs.
        padding_bytes: Memory of one KV block over all layers, bytes.
    """
    usable = free_bytes * utilization
    return MemoryShares(
        free_bytes=free_bytes,
        usable_bytes=usable,
        margin_bytes=free_bytes * (1 - utilization),
        graph_bytes=usable * graph_reserve,
        kv_bytes=usable * (1 - graph_reserve),
        padding_bytes=padding_bytes,
        utilization=utilization,
        graph_reserve=graph_reserve,
    )


def format_bytes(amount: float) -> str:
    """Return an amount with four significant digits in the largest unit that leaves it at 1024 or less. Pure."""
    unit = 0
    while abs(amount) > 1024 and unit < len(_UNITS) - 1:
        amount /= 1024
        unit += 1
    return f"{amount:.4g} {_UNITS[unit]}"


_MEMINFO = "/proc/meminfo"


@attrs.frozen
class MemoryUse:
    """Used and total memory of device and host, bytes."""

    device_bytes: int
    device_total_bytes: int
    host_bytes: int
    host_total_bytes: int

    @classmethod
    def of(cls, habana: Habana) -> MemoryUse:
        """Measure after a garbage collection; the emulated device counts allocations without one."""
        if habana.emulated is None:
            gc.collect()
        free, total = habana.hpu.mem_get_info()
        return cls(total - free, total, *host_memory())


class MemoryMeter:
    """Measures memory taken since its creation.

    Args:
        habana: Device to measure.
    """

    def __init__(self, habana: Habana) -> None:
        self._habana = habana
        self._before = MemoryUse.of(habana)

    def summary(self) -> str:
        """Return the memory taken since creation and the memory in use, in words."""
        now, before = MemoryUse.of(self._habana), self._before
        return (
            f"{format_bytes(now.device_bytes - before.device_bytes)} of device memory "
            f"({format_bytes(now.device_bytes)}/{format_bytes(now.device_total_bytes)} used) and "
            f"{format_bytes(now.host_bytes - before.host_bytes)} of host memory "
            f"({format_bytes(now.host_bytes)}/{format_bytes(now.host_total_bytes)} used)"
        )


def host_memory(path: str = _MEMINFO) -> tuple[int, int]:
    """Return used and total memory of the host, bytes.

    Args:
        path: Path of Linux' ``meminfo``; without it, free pages count as available memory.
    """
    try:
        with open(path, encoding="ascii") as lines:
            fields = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        total, available = fields["MemTotal"], fields["MemAvailable"]
    except (OSError, KeyError, ValueError):
        page = os.sysconf("SC_PAGE_SIZE")
        total, available = os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
    return total - available, total
