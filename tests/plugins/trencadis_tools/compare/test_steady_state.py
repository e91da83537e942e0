from __future__ import annotations

import numpy as np
import pytest

from trencadis_tools.compare.steady_state import Backlog, backlog_of, combined, mean_in_system, warm_up_cut


def queue(rng: np.random.Generator, num: int, load: float) -> tuple[np.ndarray, np.ndarray]:
    """Return arrivals and ends of an M/M/1 queue that begins empty."""
    arrivals_s, services_s = np.cumsum(rng.exponential(1 / load, num)), rng.exponential(1.0, num)
    free_s, ends_s = 0.0, np.empty(num)
    for index in range(num):
        free_s = max(free_s, arrivals_s[index]) + services_s[index]
        ends_s[index] = free_s
    return arrivals_s, ends_s


def share_growing(load: float, *, repeats: int, num: int = 2000) -> float:
    rng = np.random.default_rng(1)
    return sum(backlog_of(*queue(rng, num, load)).is_growing for _ in range(repeats)) / repeats


def slow_cut(values: np.ndarray) -> int:
    """Return MSER-5 by its definition."""
    num = len(values) // 5
    batches = values[: 5 * num].reshape(num, 5).mean(axis=1)
    scores = [np.var(batches[cut:]) / (num - cut) for cut in range(num // 2 + 1)]
    return 5 * int(np.argmin(scores))


@pytest.mark.parametrize("num", [10, 57, 400])
def test_the_cut_minimises_the_variance_of_the_rest_by_how_much_is_left(num: int) -> None:
    rng = np.random.default_rng(num)
    values = rng.normal(size=num) + 20 * np.exp(-np.arange(num) / 20)
    assert warm_up_cut(values) == slow_cut(values)


def test_a_step_at_the_beginning_is_cut_where_it_ends() -> None:
    values = np.concatenate([np.full(50, 10.0), np.tile([0.0, 1.0], 250)])
    assert warm_up_cut(values) == 50


def test_nothing_to_cut_and_too_little_to_tell() -> None:
    assert warm_up_cut(np.tile([0.0, 1.0], 100)) == 0
    assert warm_up_cut(np.array([5.0, 1.0, 1.0])) == 0


def test_the_mean_number_in_the_system_is_the_area_under_its_steps() -> None:
    # One request from 0 to 4, one from 1 to 2.
    counts = mean_in_system(np.array([0.0, 1.0]), np.array([4.0, 2.0]), np.array([0.0, 1.0, 2.0, 6.0]))
    assert counts.tolist() == [1.0, 2.0, 0.5]


def test_littles_law_holds_between_the_edges() -> None:
    arrivals_s, ends_s = queue(np.random.default_rng(3), 500, 0.7)
    edges = np.linspace(0.0, ends_s.max(), 40)
    area = (mean_in_system(arrivals_s, ends_s, edges) * np.diff(edges)).sum()
    assert area == pytest.approx((ends_s - arrivals_s).sum())


def test_a_queue_at_half_load_is_steady_and_an_overloaded_one_is_not() -> None:
    assert share_growing(0.5, repeats=30) == 0.0
    assert share_growing(1.3, repeats=10) == 1.0


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("load", "least", "most"), [(0.5, 0.0, 0.01), (0.8, 0.0, 0.02), (0.9, 0.0, 0.03), (1.1, 0.6, 1.0), (1.2, 0.97, 1.0)]
)
def test_how_often_a_queue_of_2000_requests_is_called_unstable(load: float, least: float, most: float) -> None:
    assert least <= share_growing(load, repeats=300) <= most


def test_growth_is_the_share_of_arrivals_that_stay() -> None:
    num = 4000
    arrivals_s = np.arange(num) * 0.8
    ends_s = 1.0 + np.arange(num)  # one a second, although 1.25 come
    assert backlog_of(arrivals_s, ends_s).growth == pytest.approx(1 - 0.8, abs=0.01)
    assert backlog_of(arrivals_s, arrivals_s + 0.5) == Backlog(
        growth=pytest.approx(0.0, abs=1e-9), p_value=pytest.approx(0.5, abs=0.5)
    )


def test_a_few_requests_and_requests_at_once_tell_nothing() -> None:
    assert not backlog_of(np.arange(5.0), np.arange(5.0) + 100).is_growing
    assert not backlog_of(np.zeros(500), np.arange(500.0)).is_growing


def test_runs_that_are_each_unsure_are_sure_together() -> None:
    unsure = Backlog(growth=0.05, p_value=0.05)
    assert not unsure.is_growing
    both = combined([unsure] * 9)
    assert both.is_growing
    assert both.p_value == pytest.approx(4.0e-7, rel=0.1)  # 1.645 · √9 standard deviations
    assert not combined([Backlog(growth=0.01, p_value=1e-9)]).is_growing  # surely, and too little to matter
    assert combined([Backlog(growth=0.0, p_value=1.0), unsure]).p_value > 0.5
