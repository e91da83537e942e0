from __future__ import annotations

import pytest
import torch

from trencadis.interfaces import Verification
from trencadis_torch.verify import MatchingPrefix, accepted_paths


def drafted(parents, *, num_drafts=None, is_linear=False, columns=None):
    rows, width = len(parents), columns or len(parents[0])
    counts = num_drafts or [len(row) for row in parents]
    padded = [list(row) + list(range(len(row), width)) for row in parents]
    return Verification(
        tokens=torch.arange(width).expand(rows, -1),
        parents=torch.tensor(padded),
        num_drafts=torch.tensor(counts),
        is_linear=is_linear,
    )


def run(verification, accept, uniforms):
    taken = accepted_paths(
        verification, torch.tensor(accept, dtype=torch.float64), torch.tensor(uniforms, dtype=torch.float64)
    )
    paths = [row[:count] for row, count in zip(taken.nodes.tolist(), taken.num_accepted.tolist(), strict=True)]
    assert taken.nodes.shape == verification.tokens.shape
    return paths, taken.stops.tolist()


CHAIN = [0, 1, 2]


@pytest.mark.parametrize("is_linear", [True, False])
@pytest.mark.parametrize(
    ("uniforms", "path"),
    [
        ([0.49, 0.49, 0.49, 0.0], [1, 2, 3]),
        ([0.49, 0.49, 0.51, 0.0], [1, 2]),
        ([0.49, 0.51, 0.01, 0.0], [1]),
        ([0.51, 0.01, 0.01, 0.0], []),
        ([0.5, 0.01, 0.01, 0.0], []),
    ],
)
def test_a_chain_goes_on_while_numbers_are_below_the_shares(uniforms, path, is_linear):
    paths, stops = run(drafted([CHAIN], is_linear=is_linear), [[0.5] * 3], [uniforms])
    assert paths == [path]
    assert stops == [len(path)]


@pytest.mark.parametrize("is_linear", [True, False])
def test_padding_is_not_walked_to_whatever_its_share(is_linear):
    asked = drafted([CHAIN] * 3, num_drafts=[3, 1, 0], is_linear=is_linear)
    paths, stops = run(asked, [[1.0] * 3] * 3, [[0.3] * 4] * 3)
    assert paths == [[1, 2, 3], [1], []]
    assert stops == [3, 1, 0]


@pytest.mark.parametrize(
    ("number", "child"), [(0.1, 1), (0.19, 1), (0.2, 2), (0.49, 2), (0.51, 3), (0.89, 3), (0.9, None), (0.99, None)]
)
def test_siblings_have_their_shares_one_behind_another(number, child):
    paths, stops = run(drafted([[0, 0, 0]]), [[0.2, 0.3, 0.4]], [[number, 0, 0, 0]])
    assert paths == [[] if child is None else [child]]
    assert stops == [child or 0]


def test_the_walk_goes_down_the_branch_that_it_took():
    # 0 ─ 1 ─ 3 ─ 5
    #   └ 2 ─ 4
    tree = [0, 0, 1, 2, 3]
    shares = [[0.5, 0.5, 0.5, 0.5, 0.5]] * 4
    numbers = [
        [0.1, 0.1, 0.9, 0.1, 0.9, 0.9],
        [0.7, 0.1, 0.1, 0.1, 0.1, 0.9],
        [0.7, 0.1, 0.9, 0.1, 0.1, 0.9],
        [0.1, 0.9, 0.1, 0.1, 0.1, 0.9],
    ]
    paths, stops = run(drafted([tree] * 4), shares, numbers)
    assert paths == [[1, 3, 5], [2, 4], [2], [1]]
    assert stops == [5, 4, 2, 1]


def test_a_share_of_zero_is_never_taken_and_one_always():
    tree = drafted([[0, 0, 2]] * 2)
    smallest, largest = 2.0**-53, 1 - 2.0**-53
    paths, _ = run(tree, [[0.0, 1.0, 1.0]] * 2, [[smallest] * 4, [largest] * 4])
    assert paths == [[2, 3], [2, 3]]


def test_frequencies_of_paths_are_products_of_shares():
    generator = torch.Generator().manual_seed(0)
    count, tree = 40_000, [0, 0, 1, 1]
    asked = drafted([tree] * count)
    shares = torch.tensor([[0.5, 0.2, 0.3, 0.6]]).double().expand(count, -1)
    taken = accepted_paths(asked, shares, torch.rand((count, 5), generator=generator, dtype=torch.float64))
    found = taken.stops.bincount(minlength=5) / count
    expected = torch.tensor([0.3, 0.5 * 0.1, 0.2, 0.15, 0.3])
    # Five standard deviations of a share of .3.
    assert (found - expected).abs().max() < 5 * (0.21 / count) ** 0.5


def test_matching_drafts_stand():
    asked = Verification(
        tokens=torch.tensor([[7, 8, 9]]),
        parents=torch.tensor([[0, 0, 2]]),
        num_drafts=torch.tensor([3]),
        is_linear=False,
        sampled=torch.tensor([[8, 9, 9, 9]]),
    )
    assert MatchingPrefix().accept(asked).tolist() == [[0, 1, 1]]
