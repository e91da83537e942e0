from __future__ import annotations

import attrs
import pytest

from trencadis.records import EngineTotals
from trencadis_tools.bench.counts import counted_since


def test_numbers_and_positions_are_told_apart() -> None:
    before = {"steps": 3, "seconds": 0.5, "positions": (1, 2)}
    after = {"steps": 10, "seconds": 0.75, "positions": (4, 2, 7)}
    assert counted_since(before, after) == {"steps": 7, "seconds": 0.25, "positions": (3, 0, 7)}


def test_positions_that_became_fewer_are_no_two_readings_of_one_engine() -> None:
    with pytest.raises(ValueError, match="zip"):
        counted_since({"positions": (1, 2)}, {"positions": (1,)})


def test_every_total_of_an_engine_can_be_counted() -> None:
    totals = attrs.asdict(EngineTotals())
    assert counted_since(totals, totals) == totals
