from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from trencadis.client.beam_search import BeamSearch
from trencadis.records import BeamSearchParams, TokenLogprobs

Path = tuple[int, ...]
Distribution = Callable[[Path], list[float]]


def toy_distribution(seed: int, vocab_size: int) -> Distribution:
    """A model over a few tokens: log-probabilities that depend on every token so far."""

    def distribution(path: Path) -> list[float]:
        rng = random.Random(f"{seed} {path}")
        logits = [rng.gauss(0, 1.5) for _ in range(vocab_size)]
        total = math.log(math.fsum(map(math.exp, logits)))
        return [logit - total for logit in logits]

    return distribution


def offer(distribution: Distribution, path: Path, num: int) -> TokenLogprobs:
    logprobs = distribution(path)
    order = sorted(range(len(logprobs)), key=lambda token: -logprobs[token])[:num]
    return TokenLogprobs(
        index=0,
        position=len(path),
        token_id=order[0],
        logprob=logprobs[order[0]],
        rank=1,
        top_token_ids=tuple(order),
        top_logprobs=tuple(logprobs[token] for token in order),
    )


def searched(distribution: Distribution, *, ends: set[int], max_tokens: int, **params: Any) -> list[tuple[Path, float]]:
    search = BeamSearch(BeamSearchParams(**params), end_token_ids=frozenset(ends), max_tokens=max_tokens)
    while search.live:
        search.advance([offer(distribution, beam.token_ids(), search.num_candidates) for beam in search.live])
    return [(one.beam.token_ids(), one.score) for one in search.ended]


def every_text(distribution: Distribution, *, ends: set[int], max_tokens: int) -> Iterator[tuple[Path, float]]:
    """Every complete continuation with its sum of log-probabilities, by brute force."""
    for length in range(1, max_tokens + 1):
        for path in itertools.product(range(len(distribution(()))), repeat=length):
            if ends & set(path[:-1]) or (length < max_tokens and path[-1] not in ends):
                continue
            yield path, math.fsum(distribution(path[:i])[token] for i, token in enumerate(path))


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -0.7])
@pytest.mark.parametrize(("vocab_size", "max_tokens"), [(2, 5), (3, 3), (5, 2), (6, 2)])
@pytest.mark.parametrize("ends", [set(), {0}, {0, 1}])
def test_with_room_for_every_text_the_best_is_the_best_of_all(
    vocab_size: int, max_tokens: int, ends: set[int], length_penalty: float
) -> None:
    for seed in range(4):
        distribution = toy_distribution(seed, vocab_size)
        texts = [
            (path, total / len(path) ** length_penalty)
            for path, total in every_text(distribution, ends=ends, max_tokens=max_tokens)
        ]
        texts.sort(key=lambda text: -text[1])
        found = searched(
            distribution,
            ends=ends,
            max_tokens=max_tokens,
            beam_width=vocab_size**max_tokens,
            length_penalty=length_penalty,
            early_stopping="never",
        )
        assert [path for path, _ in found] == [path for path, _ in texts]
        assert [score for _, score in found] == pytest.approx([score for _, score in texts])


def test_one_beam_takes_the_likeliest_token_each_time() -> None:
    distribution = toy_distribution(9, 7)
    path: Path = ()
    while len(path) < 6:
        path += offer(distribution, path, 1).top_token_ids
    assert [one for one, _ in searched(distribution, ends=set(), max_tokens=6, beam_width=1)] == [path]


def test_a_wider_beam_finds_what_a_greedy_one_passes_over() -> None:
    half, little, most = math.log(0.5), math.log(0.1), math.log(0.9)

    def distribution(path: Path) -> list[float]:
        return {(): [math.log(0.6), math.log(0.4)], (0,): [half, half], (1,): [little, most]}[path]

    greedy = searched(distribution, ends=set(), max_tokens=2, beam_width=1, length_penalty=0.0)
    wider = searched(distribution, ends=set(), max_tokens=2, beam_width=2, length_penalty=0.0)
    assert greedy[0][0] == (0, 0)
    assert wider[0] == ((1, 1), pytest.approx(math.log(0.36)))


def ends_at_once(path: Path) -> list[float]:
    """Token 0 ends a text, and is as good as the one way on; the third is never good."""
    return [math.log(0.48), math.log(0.5), math.log(0.02)]


def num_rounds(**params: Any) -> int:
    search = BeamSearch(BeamSearchParams(beam_width=1, **params), end_token_ids=frozenset({0, 2}), max_tokens=9)
    rounds = 0
    while search.live:
        search.advance([offer(ends_at_once, beam.token_ids(), 3) for beam in search.live])
        rounds += 1
    return rounds


def test_a_text_that_ends_only_counts_among_the_best_so_many() -> None:
    assert (
        num_rounds(length_penalty=0.0) == 9
    )  # the way on is always the best, so that nothing ends before the last token


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "expected"),
    [
        (True, 1.0, 1),  # two texts have ended with the first token
        (False, 1.0, 1),  # -1.61 / 1 of the best running one is below the -1.2 of the worst
        ("never", 0.0, 1),
        ("never", 1.0, 8),  # it may become as good as -1.61 / 8 = -0.2
    ],
)
def test_when_the_search_ends_is_a_matter_of_early_stopping(
    early_stopping: bool | str, length_penalty: float, expected: int
) -> None:
    distribution = [math.log(0.5), math.log(0.3), math.log(0.2)]
    search = BeamSearch(
        BeamSearchParams(beam_width=2, length_penalty=length_penalty, early_stopping=early_stopping),  # type: ignore[arg-type]
        end_token_ids=frozenset({0, 1}),
        max_tokens=8,
    )
    rounds = 0
    while search.live:
        # The first step can end in two ways; after it the one way on costs nothing.
        certain = [-40.0, -41.0, 0.0] if rounds else distribution
        search.advance([offer(lambda _, now=certain: now, beam.token_ids(), 3) for beam in search.live])  # type: ignore[misc]
        rounds += 1
    assert rounds == expected


def test_tokens_that_cannot_be_are_no_candidates() -> None:
    def distribution(path: Path) -> list[float]:
        return [0.0, -math.inf, -math.inf]

    assert [path for path, _ in searched(distribution, ends=set(), max_tokens=3, beam_width=2)] == [(0, 0, 0)]


def test_among_equals_the_order_is_that_of_what_was_offered() -> None:
    def distribution(path: Path) -> list[float]:
        return [math.log(0.25)] * 4

    found = searched(distribution, ends=set(), max_tokens=2, beam_width=3)
    assert [path for path, _ in found] == [(0, 0), (0, 1), (0, 2)]
