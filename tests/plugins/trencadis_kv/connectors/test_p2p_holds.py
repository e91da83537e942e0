from __future__ import annotations

import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import TransferError
from trencadis_kv.connectors.p2p.holds import Holds


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture
def holds(clock: SimulatedClock) -> Holds:
    return Holds(clock, lease_s=10.0, max_hold_s=25.0, max_bytes=100)


def add(holds: Holds, transfer_id: int, num_bytes: int = 40) -> str:
    name = f"hold {transfer_id}"
    assert holds.add(transfer_id, name, {b"h": transfer_id}, num_bytes=num_bytes)
    return name


def nothing() -> None:
    return None


def test_hold_ends_with_its_lease(holds: Holds, clock: SimulatedClock) -> None:
    add(holds, 7)
    clock.advance(9.9)
    assert holds.take_free() == ()
    clock.advance(0.2)
    assert holds.take_free() == (7,)
    assert holds.take_free() == ()
    assert (holds.num_holds, holds.num_bytes, holds.ends) == (0, 0, {"expired": 1})


def test_released_hold_is_free_at_once_and_released_once(holds: Holds) -> None:
    name = add(holds, 7)
    assert holds.release(name)
    assert not holds.release(name)
    assert holds.take_free() == (7,)
    assert holds.ends == {"released": 1}


def test_renewal_begins_a_lease_anew_but_not_for_ever(holds: Holds, clock: SimulatedClock) -> None:
    name = add(holds, 7)
    for _ in range(4):
        clock.advance(6.0)
        assert holds.take_free() == ()
        assert holds.renew(name)
    clock.advance(1.1)
    assert holds.take_free() == (7,)
    assert not holds.renew(name)


def test_blocks_that_somebody_reads_stay_until_it_is_done(holds: Holds, clock: SimulatedClock) -> None:
    name = add(holds, 7)
    hold = holds.open(name, nothing)
    assert hold.index == {b"h": 7}
    clock.advance(12.0)
    assert holds.take_free() == ()
    holds.release(name)
    assert holds.take_free() == ()
    holds.close(hold, nothing)
    assert holds.take_free() == (7,)


def test_reader_that_takes_too_long_is_cut(holds: Holds, clock: SimulatedClock) -> None:
    name, cuts = add(holds, 7), []

    def cut() -> None:
        cuts.append(name)

    hold = holds.open(name, cut)
    clock.advance(25.1)
    assert holds.take_free() == ()
    assert cuts == [name]
    holds.close(hold, cut)
    assert holds.take_free() == (7,)


def test_two_readers_end_one_after_the_other(holds: Holds) -> None:
    name = add(holds, 7)
    first = holds.open(name, nothing)
    second = holds.open(name, nothing)
    holds.close(first, nothing)
    holds.release(name)
    assert holds.take_free() == ()
    holds.close(second, nothing)
    assert holds.take_free() == (7,)


def test_no_more_bytes_are_held_than_may_be(holds: Holds) -> None:
    add(holds, 1)
    add(holds, 2)
    assert not holds.add(3, "too many", {}, num_bytes=21)
    assert (holds.num_bytes, holds.ends) == (80, {"refused": 1})
    holds.release("hold 1")
    holds.take_free()
    add(holds, 4, num_bytes=60)


@pytest.mark.parametrize("ending", ["never held", "released", "expired"])
def test_hold_that_is_over_is_lost(holds: Holds, clock: SimulatedClock, ending: str) -> None:
    name = add(holds, 7)
    if ending == "released":
        holds.release(name)
    elif ending == "expired":
        clock.advance(11)
        holds.take_free()
    with pytest.raises(TransferError) as caught:
        holds.open("no such hold" if ending == "never held" else name, nothing)
    assert caught.value.cause == "lost"
