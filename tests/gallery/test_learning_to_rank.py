"""The results of docs/gallery/learning_to_rank.md: rankings are as right as they say, and the more right the sooner answers come."""

from __future__ import annotations

import itertools

import pytest
from examples.gallery.learning_to_rank.measure import HERE, TAUS, compare_at, ranked

from support.strategies.gallery_pages import page_of, results_of
from trencadis_tools.workloads import Workload, load_workload


def kendall_tau(workload: Workload) -> float:
    """Return (concordant - discordant) / pairs of priorities and lengths, of pairs with different lengths, pair by pair."""
    sign = 0
    num = 0
    for one, two in itertools.combinations(workload.requests, 2):
        difference = (one.num_output_tokens - two.num_output_tokens) * (one.priority - two.priority)
        sign += (difference > 0) - (difference < 0)
        num += difference != 0
    return sign / num


def test_a_ranking_has_the_tau_that_was_asked_for() -> None:
    workload = load_workload(str(HERE / "chats.toml"))
    assert kendall_tau(ranked(workload, 1.0, 0)) == 1.0
    # The standard deviation of tau of n independent pairs is below sqrt(2 (2n + 5) / 9n (n - 1)), .039 of 300.
    for tau in (0.0, 0.3, 0.7):
        assert kendall_tau(ranked(workload, tau, 1)) == pytest.approx(tau, abs=4 * 0.039)


def test_a_ranking_changes_priorities_alone_and_uses_each_once() -> None:
    workload = load_workload(str(HERE / "chats.toml"), limit=50)
    noisy = ranked(workload, 0.5, 0)
    assert sorted(one.priority for one in noisy.requests) == list(range(50))
    for before, after in zip(workload.requests, noisy.requests, strict=True):
        assert (before.request_id, before.num_output_tokens, before.max_tokens) == (
            after.request_id,
            after.num_output_tokens,
            after.max_tokens,
        )


def test_the_true_ranking_answers_a_fifth_sooner_and_a_noisy_one_gains_less() -> None:
    noisy, true = compare_at("all at once", 4, taus=(0.3, 1.0), num_requests=60)
    assert true.gain_low > 1
    assert noisy.gain < true.gain


def test_the_page_shows_the_results_that_are_kept() -> None:
    page = page_of("learning_to_rank")
    kept = results_of("learning_to_rank")
    for tau in TAUS:
        shown = [
            f"{row['value_s']:.3g} | {row['gain']:.2f} ({row['gain_low']:.2f} to {row['gain_high']:.2f}) | {row['worst_ratio']:.2f}"
            for row in kept
            if row["tau"] == tau
        ]
        assert f"| {tau:g} | {' | '.join(shown)} |" in page
