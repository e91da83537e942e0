from __future__ import annotations

import random

import attrs
import numpy as np
import pytest

from trencadis.records import EngineTotals
from trencadis_tools.bench.counts import counted_since
from trencadis_tools.bench.service_gap import ServiceGap


def serve(gap: ServiceGap, **costs: float) -> None:
    tenants = np.array([int(name[1:]) for name in costs], np.int64)
    gap.serve(tenants, np.array(list(costs.values())))


def test_who_has_nothing_waiting_is_owed_nothing() -> None:
    gap = ServiceGap(2)
    gap.waits(0)
    serve(gap, t0=1000.0)
    gap.waits(1)
    serve(gap, t0=5.0)
    gap.runs(1)
    serve(gap, t0=1000.0)
    assert gap.largest == 5.0


def test_it_is_the_largest_over_every_interval_by_definition() -> None:
    """Against all pairs, all starts and all ends of intervals in which both waited throughout."""
    rng = random.Random(3)
    gap, waiting = ServiceGap(3), [0, 0, 0]
    served, backlog = [[0.0] * 3], []
    for _ in range(120):
        tenant = rng.randrange(3)
        if waiting[tenant] and rng.random() < 0.5:
            gap.runs(tenant)
            waiting[tenant] -= 1
        else:
            gap.waits(tenant)
            waiting[tenant] += 1
        costs = [rng.choice([0.0, 1.0, 7.0]) for _ in range(3)]
        serve(gap, **{f"t{i}": cost for i, cost in enumerate(costs)})
        served.append([old + new for old, new in zip(served[-1], costs, strict=True)])
        backlog.append([count > 0 for count in waiting])
    largest = 0.0
    for one in range(3):
        for other in range(one):
            for start in range(len(backlog)):
                for stop in range(start, len(backlog)):
                    if not (backlog[stop][one] and backlog[stop][other]):
                        break
                    drift = (served[stop + 1][one] - served[start][one]) - (
                        served[stop + 1][other] - served[start][other]
                    )
                    largest = max(largest, abs(drift))
    assert gap.largest == largest > 7


def test_every_total_of_an_engine_can_be_counted_between_two_readings_of_it() -> None:
    before = {"steps": 3, "seconds": 0.5, "positions": (1, 2)}
    after = {"steps": 10, "seconds": 0.75, "positions": (4, 2, 7)}
    assert counted_since(before, after) == {"steps": 7, "seconds": 0.25, "positions": (3, 0, 7)}
    with pytest.raises(ValueError, match="zip"):
        counted_since(after, before)
    totals = attrs.asdict(EngineTotals())
    assert counted_since(totals, totals) == totals
