from __future__ import annotations

import random

import numpy as np

from trencadis_tools.bench.service_gap import ServiceGap


def serve(gap: ServiceGap, **costs: float) -> None:
    tenants = np.array([int(name[1:]) for name in costs], np.int64)
    gap.serve(tenants, np.array(list(costs.values())))


def test_what_tenants_drift_apart_while_both_wait_is_counted() -> None:
    gap = ServiceGap(2)
    gap.waits(0)
    gap.waits(1)
    for _ in range(3):
        serve(gap, t0=10.0, t1=4.0)
    assert gap.largest == 18.0


def test_swings_to_both_sides_add_up() -> None:
    gap = ServiceGap(2)
    gap.waits(0)
    gap.waits(1)
    serve(gap, t0=10.0)
    serve(gap, t1=25.0)
    assert gap.largest == 25.0


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
