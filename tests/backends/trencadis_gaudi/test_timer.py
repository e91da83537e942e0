from __future__ import annotations

from types import SimpleNamespace

import attrs

from trencadis.clock import SimulatedClock, SystemClock
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.habana import load_habana
from trencadis_gaudi.timer import GaudiTimer


def test_emulated_step_takes_what_the_clock_says():
    clock = SimulatedClock()
    timer = GaudiTimer(load_habana(GaudiConfig(device="emulated", mode="lazy"), clock=clock))
    clock.advance(0.5)
    timer.stop()
    clock.advance(9)
    assert timer.wait() == 0.5


def test_step_of_a_gaudi_is_measured_by_two_events():
    log = []

    class Event:
        def __init__(self, enable_timing=False):
            assert enable_timing

        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("synchronize")

        def elapsed_time(self, end_event):
            return 250.0

    habana = load_habana(GaudiConfig(device="emulated", mode="lazy"), clock=SystemClock())
    timer = GaudiTimer(attrs.evolve(habana, emulated=None, hpu=SimpleNamespace(Event=Event)))
    timer.stop()
    assert timer.wait() == 0.25
    assert log == ["record", "record", "synchronize"]
