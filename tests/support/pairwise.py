"""Few cases in which every two values of different axes meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

Case = dict[str, str]


def pairwise(
    axes: Mapping[str, Sequence[str]], *, allowed: Callable[[Case], bool] = lambda case: True, seed: int = 0
) -> list[Case]:
    """Return cases so that every pair of values that some allowed case has is in one of them. Pure.

    Greedy: of many random allowed cases the one with most new pairs is taken, until no pair is left that a case was found for.
    """
    rng = random.Random(seed)
    pool = [case for case in _all_or_some(axes, rng) if allowed(case)]
    missing = set().union(*(_pairs(case) for case in pool))
    chosen = []
    while missing:
        best = max(pool, key=lambda case: len(_pairs(case) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _all_or_some(axes: Mapping[str, Sequence[str]], rng: random.Random, *, most: int = 3000) -> list[Case]:
    every = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return every if len(every) <= most else rng.sample(every, most)


def _pairs(case: Case) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    return set(itertools.combinations(sorted(case.items()), 2))
