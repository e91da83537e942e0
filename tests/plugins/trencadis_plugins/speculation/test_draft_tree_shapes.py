from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from trencadis_plugins.speculation.draft_tree_shapes import (
    SiblingAcceptance,
    TreeShape,
    best_shape,
    chain,
    expected_tokens,
    layered,
)


def trees(size: int, depth: int, width: int) -> set[tuple[tuple[int, ...], ...]]:
    """Every tree of at most ``size`` nodes as a set of paths of ranks, from the definition: with a node its parent and elder sibling."""
    found = {()}
    fresh = {()}
    for _ in range(size):
        grown = set()
        for tree in fresh:
            for path in ((), *tree):
                rank = sum(len(other) == len(path) + 1 and other[:-1] == path for other in tree)
                if len(path) < depth and rank < width:
                    grown.add(tuple(sorted((*tree, (*path, rank)))))
        found |= grown
        fresh = grown
    return found


def value(tree: tuple[tuple[int, ...], ...], rates: tuple[float, ...]) -> float:
    return 1 + sum(float(np.prod([rates[rank] for rank in path])) for path in tree)


def paths(shape: TreeShape) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for parent, rank in zip(shape.parents, shape.ranks, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), rank))
    return found


RATES = [(0.7, 0.2, 0.05), (0.4, 0.35, 0.2), (0.2, 0.6, 0.1), (0.9,), (0.3, 0.3, 0.3), (0.05, 0.0, 0.9), (1.0, 0.0)]


@pytest.mark.parametrize(("size", "depth"), [(1, 1), (3, 2), (5, 3), (6, 2), (5, 5)])
def test_no_tree_promises_more_than_the_best_shape(size: int, depth: int) -> None:
    for rates in RATES:
        shape = best_shape(rates, size=size, depth=depth)
        best = max(value(tree, rates) for tree in trees(size, depth, len(rates)))
        assert expected_tokens(shape, rates) == pytest.approx(best, abs=1e-12)
        assert tuple(sorted(paths(shape))) in trees(size, depth, len(rates))


def test_the_first_nodes_of_the_best_shape_are_the_likeliest() -> None:
    rates = (0.6, 0.25, 0.1)
    shape = best_shape(rates, size=24, depth=5)
    reached = [float(np.prod([rates[rank] for rank in path])) for path in paths(shape)]
    assert reached == sorted(reached, reverse=True)
    assert all(parent < node for node, parent in enumerate(shape.parents))
    assert shape.first(5) == TreeShape(shape.parents[:5], shape.ranks[:5])


def test_expected_tokens_are_those_of_all_outcomes() -> None:
    shape = layered((2, 2), most=6)
    rates = (0.5, 0.3)
    total = 0.0
    for path in itertools.product((0, 1, 2), repeat=2):  # 2: none of the children
        chance = float(np.prod([(*rates, 0.2)[rank] for rank in path]))
        total += chance * (1 if path[0] == 2 else 2 if path[1] == 2 else 3)
    assert expected_tokens(shape, rates) == pytest.approx(total)


def test_layers_and_lines_are_what_they_are_called() -> None:
    assert chain(3) == TreeShape((-1, 0, 1), (0, 0, 0))
    assert layered((2, 1, 2), most=99) == TreeShape((-1, -1, 0, 1, 2, 2, 3, 3), (0, 1, 0, 0, 0, 1, 0, 1))
    assert layered((2, 3), most=4) == TreeShape((-1, -1, 0, 0), (0, 1, 0, 1))


def test_rates_of_siblings_come_to_those_that_are_observed() -> None:
    rng, rates = random.Random(2), (0.3, 0.5)
    measured = SiblingAcceptance(3)
    shape = layered((2, 2), most=6)
    tokens = np.array([10, 11, 20, 21, 20, 21], np.int32)
    for _ in range(4000):
        followed = []
        for first in (10, 20):
            draw = rng.random()
            followed.append(first if draw < rates[0] else first + 1 if draw < sum(rates) else 99)
        measured.observe(tokens, shape, np.array([*followed, 5], np.int32))
    assert measured.num_observed == 4000
    assert measured.rates[:2] == pytest.approx(rates, abs=0.03)
    assert measured.rates[2] == pytest.approx(0.6 * 0.09, abs=0.01), "never had the chance"


def test_what_was_not_reached_is_not_counted() -> None:
    measured = SiblingAcceptance(1)
    before = measured.rates
    measured.observe(np.array([1, 2], np.int32), chain(2), np.array([7], np.int32))
    measured.observe(np.array([1, 2], np.int32), chain(2), np.array([], np.int32))
    visits = SiblingAcceptance.WEIGHT + 1
    assert measured.rates == (round(before[0] * SiblingAcceptance.WEIGHT / visits, 2),)
