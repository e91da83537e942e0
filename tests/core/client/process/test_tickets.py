from __future__ import annotations

from trencadis.client.process.tickets import Tickets


def test_the_smallest_free_number_is_given() -> None:
    tickets = Tickets()
    assert [tickets.take() for _ in range(4)] == [0, 1, 2, 3]
    tickets.give_back(2)
    tickets.give_back(0)
    assert tickets.num_taken == 2
    assert [tickets.take() for _ in range(3)] == [0, 2, 4]
    assert tickets.num_taken == 5
