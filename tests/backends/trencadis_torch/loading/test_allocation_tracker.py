from __future__ import annotations

import torch

from trencadis_torch.loading.allocation_tracker import LiveBytes


def test_what_lives_at_once_is_counted_until_it_is_let_go() -> None:
    with LiveBytes() as live:
        first = torch.zeros(1000)
        second = first + 1
        assert live.now == live.peak == 8000
        del first
        assert live.now == 4000
        third = second * 2
        assert (live.now, live.peak) == (8000, 8000)
    del second, third
    assert (live.now, live.peak) == (0, 8000)


def test_temporaries_inside_an_expression_count() -> None:
    given = torch.ones(1000)
    with LiveBytes() as live:
        result = (given * 2 + given * 3).sum()
    assert result == 5000
    assert live.peak == 3 * 4000
    assert live.now == 4


def test_views_and_operations_in_place_hold_nothing_of_their_own() -> None:
    given = torch.ones(10, 100)
    with LiveBytes() as live:
        view = given[2:].transpose(0, 1)
        view.add_(1)
        given.mul_(2)
        torch.add(given, 1, out=given)
    assert live.peak == 0


def test_a_view_keeps_the_whole_alive() -> None:
    with LiveBytes() as live:
        part = torch.zeros(1000)[:10]
        assert live.now == 4000
        del part
        assert live.now == 0


def test_it_counts_in_inference_mode() -> None:
    with torch.inference_mode(), LiveBytes() as live:
        made = torch.zeros(3, 5, dtype=torch.int8)
        assert live.now == 15
        del made
    assert (live.now, live.peak) == (0, 15)
