from __future__ import annotations

import pytest

from trencadis.clock import SimulatedClock
from trencadis_gaudi.emulated import EmulatedDevice, EmulatedDeviceError, EmulatedMemoryError


def make(total_bytes=1000, **options):
    return EmulatedDevice(total_bytes=total_bytes, lazy=True, clock=SimulatedClock(), **options)


def test_recipe_is_compiled_once_and_charged_once():
    device = make(compile_s=2.5)
    assert device.need_recipe(b"a", what="A")
    assert not device.need_recipe(b"a", what="A")
    assert device.need_recipe(b"b", what="B")
    assert (device.num_compilations, device.num_recipe_hits, device.compile_s) == (2, 1, 5.0)


def test_frozen_device_runs_what_it_has_and_compiles_nothing():
    device = make()
    device.need_recipe(b"a", what="A")
    device.frozen = True
    assert not device.need_recipe(b"a", what="A")
    with pytest.raises(EmulatedDeviceError, match="B would be compiled after the warm-up"):
        device.need_recipe(b"b", what="B")
    assert device.num_compilations == 1


def test_books_hold_one_amount_for_each_name():
    device = make()
    device.book("weights", 600)
    device.book("weights", 300)
    device.book("cache", 500)
    assert (device.used_bytes, device.booked("weights"), device.peak_bytes) == (800, 300, 800)
    device.book("cache", 0)
    assert (device.used_bytes, device.booked("cache"), device.peak_bytes) == (300, 0, 800)


def test_what_does_not_fit_is_refused_and_leaves_the_books_as_they_were():
    device = make()
    device.book("weights", 600)
    with pytest.raises(
        EmulatedMemoryError, match=r"emulated_memory_bytes = 1000: graphs needs 500 bytes, and 400 are free. Raise it"
    ):
        device.book("graphs", 500)
    with pytest.raises(EmulatedMemoryError):
        device.book("weights", 1001)
    assert device.used_bytes == 600


def test_peak_counts_moments_and_starts_again_on_request():
    device = make()
    device.book("weights", 100)
    device.touch(250)
    assert (device.peak_bytes, device.used_bytes) == (350, 100)
    device.reset_peak()
    assert device.peak_bytes == 100


def test_stats_have_the_vendors_names():
    device = make()
    device.book("weights", 100)
    device.book("cache", 300)
    device.book("weights", 0)
    stats = device.stats()
    assert (stats["Limit"], stats["InUse"], stats["MaxInUse"]) == (1000, 300, 400)
    assert (stats["NumAllocs"], stats["NumFrees"], stats["ActiveAllocs"], stats["MaxAllocSize"]) == (2, 1, 1, 300)
