from __future__ import annotations

import csv
import itertools
import random
from bisect import bisect_left
from pathlib import Path

import pytest

from trencadis_gallery.bucketing.fitted_sizes import optimal_sizes

CONVERSATION = Path(__file__).parents[5] / "shared" / "data" / "traces" / "azure_llm_2023_conv.csv"


def cost_of(kept, costs, weights):
    """Each size runs at the next kept one."""
    return sum(weight * costs[min(k for k in kept if k >= place)] for place, weight in enumerate(weights))


def brute_force(costs, weights, num_kept):
    last = len(costs) - 1
    choices = (
        (*some, last)
        for number in range(min(num_kept, len(costs)))
        for some in itertools.combinations(range(last), number)
    )
    return min(cost_of(kept, costs, weights) for kept in choices)


def drawn(seed):
    rng = random.Random(seed)
    num_sizes = rng.randint(1, 12)
    costs = sorted(rng.choice([rng.randint(1, 9), rng.randint(1, 1000)]) for _ in range(num_sizes))
    weights = [rng.choice([0, 0, 1, rng.randint(1, 50), 1000]) for _ in range(num_sizes)]
    return costs, weights, rng.randint(1, num_sizes + 2)


def test_result_costs_as_little_as_the_best_of_all_choices():
    for seed in range(150):
        costs, weights, num_kept = drawn(seed)
        kept = optimal_sizes(costs, weights, num_kept)
        assert cost_of(kept, costs, weights) == brute_force(costs, weights, num_kept), seed
        assert len(kept) <= num_kept
        assert kept == sorted(set(kept))
        assert kept[-1] == len(costs) - 1


def test_cost_never_rises_and_saves_less_and_less_with_every_further_size():
    for seed in range(10):
        rng = random.Random(seed)
        costs = sorted(rng.sample(range(1, 10_000), 32))
        weights = [rng.randint(0, 30) for _ in costs]
        totals = [cost_of(optimal_sizes(costs, weights, number), costs, weights) for number in range(1, 33)]
        saved = [before - after for before, after in itertools.pairwise(totals)]
        assert all(step >= 0 for step in saved)
        assert all(later <= earlier for earlier, later in itertools.pairwise(saved))
        assert totals[-1] == sum(weight * cost for weight, cost in zip(weights, costs, strict=True))


@pytest.fixture
def conversation():
    """Prompt lengths in blocks of 128 tokens, at most 64, in order of arrival; and as many tokens."""
    if not CONVERSATION.exists():
        pytest.skip(f"{CONVERSATION} is not there: the shared data folder is not part of the repository")
    with CONVERSATION.open() as rows:
        return [min(int(row["ContextTokens"]), 8192) for row in csv.DictReader(rows)]


def fit(lengths, num_kept):
    counts = [0] * 64
    for length in lengths:
        counts[-(-length // 128) - 1] += 1
    return [128 * (place + 1) for place in optimal_sizes(range(128, 8193, 128), counts, num_kept)]


def padding(sizes, lengths):
    return sum(sizes[bisect_left(sizes, length)] for length in lengths) / sum(lengths) - 1


def test_padding_of_the_conversation_is_that_of_the_source_of_the_method(conversation):
    assert padding(fit(conversation, 8), conversation) == pytest.approx(0.145, abs=0.0005)
    assert padding(fit(conversation, 12), conversation) == pytest.approx(0.104, abs=0.0005)
    assert padding(fit(conversation, 16), conversation) == pytest.approx(0.083, abs=0.0005)
    assert fit(conversation, 8) == [256, 512, 1152, 1408, 2048, 2816, 4224, 8192]


def test_first_half_of_the_conversation_predicts_the_second(conversation):
    first, second = conversation[: len(conversation) // 2], conversation[len(conversation) // 2 :]
    assert padding(fit(first, 12), second) == pytest.approx(0.139, abs=0.0005)
    assert padding(fit(second, 12), second) == pytest.approx(0.120, abs=0.0005)


def test_sizes_without_weight_are_not_kept_but_the_last():
    assert optimal_sizes([1, 2, 3, 4, 5], [0, 9, 0, 9, 0], 5) == [1, 3, 4]
    assert optimal_sizes([1, 2, 3], [0, 0, 0], 2) == [2]


@pytest.mark.parametrize(
    ("costs", "weights", "num_kept"), [([], [], 1), ([1, 2], [1], 1), ([2, 1], [1, 1], 1), ([1], [1], 0)]
)
def test_impossible_questions_are_refused(costs, weights, num_kept):
    with pytest.raises(ValueError, match="costs must not fall"):
        optimal_sizes(costs, weights, num_kept)
