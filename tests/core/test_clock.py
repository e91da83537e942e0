from __future__ import annotations

from trencadis.clock import HeldClock, SimulatedClock


def test_a_held_clock_stands_still_until_it_is_held_again():
    source = SimulatedClock(3.0)
    clock = HeldClock(source)
    source.advance(1.0)
    assert (clock.now_s(), clock.source.now_s()) == (3.0, 4.0)
    assert clock.hold() == clock.now_s() == 4.0
