"""Facts about the device: that it opens, its memory, and copies to the host."""

from __future__ import annotations

from operator import attrgetter

import torch

from trencadis_gaudi.checks.bench import Bench, on_device
from trencadis_gaudi.checks.records import Found
from trencadis_gaudi.habana import NEEDED
from trencadis_gaudi.memory import format_bytes

__all__ = ["ALSO_USED", "host_copies", "memory", "names", "opens"]

ALSO_USED = ("hpu.device_count", "hpu.get_device_name", "hpu.memory_stats")
"""Names that these checks use and the backend does not."""

_MIB = 2**20
_TAKEN = 64 * _MIB


@on_device
def opens(bench: Bench) -> Found:
    """Open the device in the configured mode."""
    habana = bench.habana
    mode = "lazy" if habana.is_lazy else "not lazy"
    count, name = habana.hpu.device_count(), habana.hpu.get_device_name()
    is_right = habana.is_lazy == (bench.config.mode == "lazy") and count > 0
    return Found(is_right, f"{count} x {name}, {mode}, torch {torch.__version__}")


@on_device
def names(bench: Bench) -> Found:
    """Look up every name that the backend uses."""
    wanted = [name for name in NEEDED if not name.startswith("utils.")]  # utils has is_lazy, which opening has called
    wanted += ALSO_USED
    if bench.config.captures:
        wanted.append("hpu.wrap_in_hpu_graph")
    missing = [name for name in wanted if not _has(bench, name)]
    return Found(not missing, f"missing: {', '.join(missing)}" if missing else f"{len(wanted)} names are there")


def _has(bench: Bench, name: str) -> bool:
    try:
        return attrgetter(name)(bench.habana) is not None
    except AttributeError:
        return False


@on_device
def memory(bench: Bench) -> Found:
    """Compare two reports of the memory, and check that it grows."""
    hpu = bench.habana.hpu
    before = hpu.memory_allocated()
    taken = torch.zeros(_TAKEN, dtype=torch.uint8, device=bench.habana.device)
    bench.habana.declare("check", _TAKEN)
    bench.flush()
    grown, stats, info = hpu.memory_allocated() - before, hpu.memory_stats(), tuple(hpu.mem_get_info())
    del taken
    bench.habana.declare("check", 0)
    is_right = info == (stats["Limit"] - stats["InUse"], stats["Limit"])
    free, total = map(format_bytes, info)
    text = f"{free} of {total} are free; 64 MiB take {format_bytes(grown)}"
    return Found(is_right and _TAKEN <= grown <= 2 * _TAKEN, text)


@on_device
def host_copies(bench: Bench) -> Found:
    """Copy to the host without waiting, as for results of steps."""
    numbers = bench.to_device(torch.arange(2**22, dtype=torch.int32))
    computed = numbers * 3 + 1
    on_host = computed.to("cpu", non_blocking=True)
    event = bench.habana.hpu.Event()
    event.record()
    event.synchronize()
    num_wrong = int((on_host != torch.arange(2**22, dtype=torch.int32) * 3 + 1).sum())
    return Found(not num_wrong, f"{num_wrong} of {2**22} numbers are wrong after the event")
