from __future__ import annotations

import os
import re

from trencadis.clock import SystemClock
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.habana import load_habana
from trencadis_gaudi.memory import MemoryMeter, MemoryUse, host_memory

GIB = 2**30
AMOUNT = r"-?[\d.e+]+ (?:B|KiB|MiB|GiB|TiB)"


def test_summary_has_the_vendors_words_and_the_devices_numbers():
    habana = load_habana(
        GaudiConfig(device="emulated", mode="lazy", emulated_memory_bytes=96 * GIB), clock=SystemClock()
    )
    habana.declare("weights", 15 * GIB)
    meter = MemoryMeter(habana)
    habana.declare("KV cache", 24 * GIB)
    summary = meter.summary()
    assert summary.startswith("24 GiB of device memory (39 GiB/96 GiB used) and ")
    assert re.fullmatch(rf".* and {AMOUNT} of host memory \({AMOUNT}/{AMOUNT} used\)", summary)


def test_host_memory_is_what_linux_says(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       1000 kB\nMemFree:  100 kB\nMemAvailable:    400 kB\nHugePages_Total:       0\n")
    assert host_memory(str(meminfo)) == (600 * 1024, 1000 * 1024)


def test_host_memory_is_counted_in_pages_elsewhere(tmp_path):
    used, total = host_memory(str(tmp_path / "nothing"))
    assert total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < used <= total


def test_use_is_of_device_and_host():
    habana = load_habana(GaudiConfig(device="emulated", mode="lazy", emulated_memory_bytes=1000), clock=SystemClock())
    habana.declare("weights", 300)
    use = MemoryUse.of(habana)
    assert (use.device_bytes, use.device_total_bytes) == (300, 1000)
    assert 0 < use.host_bytes < use.host_total_bytes
