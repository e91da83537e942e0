from __future__ import annotations

import math
import random

import pytest

from trencadis_plugins.speculation.draft_tree_shapes import TreeShape, chain, layered
from trencadis_plugins.speculation.draft_trees import GrowingTree, ShapedTree, TopKTree

WIDTH = 3


def said_behind(path: tuple[int, ...]) -> list[tuple[int, float]]:
    """A made-up model: three tokens behind every path, best first."""
    rng = random.Random(str(path))
    odds = sorted((rng.random() for _ in range(WIDTH)), reverse=True)
    names = rng.sample(range(100), WIDTH)
    return [(name, math.log(odd / (sum(odds) + 1))) for name, odd in zip(names, odds, strict=True)]


def paths_of(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        assert parent < len(found), "a child before its parent"
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def grow(tree: GrowingTree) -> int:
    """Grow a tree; returns in how many forwards."""
    tree.tell([said_behind(())])
    rounds = 1
    while count := tree.ask():
        paths = paths_of(tree.guesses.tolist(), tree.parents.tolist())
        tree.tell([said_behind(path) for path in paths[-count:]])
        rounds += 1
    return rounds


def score(path: tuple[int, ...]) -> float:
    return sum(dict(said_behind(path[:i]))[path[i]] for i in range(len(path)))


@pytest.mark.parametrize("size", [1, 4, 9, 20])
def test_the_likeliest_of_the_expanded_nodes_stay(size: int) -> None:
    tree = TopKTree(size=size, width=2, depth=3)
    rounds = grow(tree)
    assert rounds == min(3, size)
    level: list[tuple[int, ...]] = [()]
    known: list[tuple[int, ...]] = []
    for _ in range(rounds):  # EAGLE-2, from the definition
        children = [(*path, token) for path in level for token, _ in said_behind(path)[:2]]
        known += children
        level = sorted(children, key=score, reverse=True)[:2]
    expected = sorted(known, key=score, reverse=True)[:size]
    tokens, parents, shape = tree.finish()
    assert paths_of(tokens.tolist(), parents.tolist()) == expected
    assert shape.parents == tuple(parents.tolist())
    for path, rank in zip(expected, shape.ranks, strict=True):
        assert said_behind(path[:-1])[rank][0] == path[-1]


@pytest.mark.parametrize(
    "shape",
    [
        chain(4),
        layered((3, 2, 1), most=20),
        layered((2, 2, 2), most=7),
        TreeShape((-1, 0, 1, -1, 0, 2), (0, 0, 0, 1, 1, 2)),
    ],
)
def test_a_shape_is_filled_with_what_the_model_says(shape: TreeShape) -> None:
    tree = ShapedTree(shape)
    grow(tree)
    tokens, parents, found = tree.finish()
    assert found == shape
    paths = paths_of(tokens.tolist(), parents.tolist())
    for path, rank in zip(paths, shape.ranks, strict=True):
        assert said_behind(path[:-1])[rank][0] == path[-1]


def test_only_nodes_with_children_are_asked_for() -> None:
    tree = ShapedTree(layered((3, 1), most=4))
    assert grow(tree) == 2
    assert len(tree.guesses) == 1
    assert grow(ShapedTree(chain(1))) == 1
