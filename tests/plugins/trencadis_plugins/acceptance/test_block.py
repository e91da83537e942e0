from __future__ import annotations

import pytest
import torch

from trencadis_plugins.acceptance.block import Block
from trencadis_plugins.acceptance.token import Token
from trencadis_testing.acceptance import AcceptanceConformance
from trencadis_testing.acceptance_scenes import Scene, distributions, emission


class TestBlock(AcceptanceConformance):
    make = Block
    tensor = staticmethod(torch.from_numpy)


def random_chain(seed: int, num_drafts: int) -> Scene:
    return Scene(
        parents=tuple(range(num_drafts)),
        target=distributions(seed, 4),
        proposal=distributions(500 + seed, 4),
        vocab_size=4,
    )


def by_definition(target, proposal, tokens):
    """Chances that the longest run that passes has 0 .. k drafts, one number at a time."""
    weights, count = [1.0], len(tokens)
    for p, q, token in zip(target, proposal, tokens, strict=False):
        weights.append(min(weights[-1] * p[token] / q[token], 1.0))
    passes = [1.0]
    for i in range(1, count):
        excess = sum(max(weights[i] * p - q, 0.0) for p, q in zip(target[i], proposal[i], strict=True))
        passes.append(excess / (excess + 1 - weights[i]))
    passes.append(weights[count])
    chances, left = [0.0] * (count + 1), 1.0
    for i in range(count, -1, -1):
        chances[i] = left * passes[i]
        left -= chances[i]
    return chances


def test_chances_of_each_length_are_those_of_the_definition(asked):
    scene = random_chain(9, 3)
    for tokens, _ in scene.drafted():
        target = [scene.target(tokens[:i]).tolist() for i in range(4)]
        proposal = [scene.proposal(tokens[:i]).tolist() for i in range(3)]
        shares = Block().accept(asked(tokens, target=target, proposal=proposal))[0].tolist()
        reached = [1.0, shares[0], shares[0] * shares[1], shares[0] * shares[1] * shares[2], 0.0]
        found = [reached[i] - reached[i + 1] for i in range(4)]
        assert found == pytest.approx(by_definition(target, proposal, tokens), abs=1e-12)


@pytest.mark.parametrize(("num_drafts", "least", "most"), [(1, 0.0, 1e-9), (2, 0.0, 0.15), (3, 0.03, 0.25)])
def test_more_drafts_stand_than_draft_by_draft(num_drafts, least, most):
    gains = []
    for seed in range(9):
        block, token = (emission(rule, random_chain(seed, num_drafts), torch.from_numpy) for rule in (Block(), Token()))
        gains.append(block.mean_accepted / token.mean_accepted - 1)
    assert min(gains) > -1e-12
    assert least <= max(gains) <= most


def test_a_weak_first_draft_is_saved_by_a_strong_second_one(asked):
    # w_1 = .375, w_2 = min(.375 * .5 / .1, 1) = 1: the run of two always passes, though the first alone would not.
    proposal = [(0.25, 0.25, 0.4, 0.1), (0.1, 0.3, 0.3, 0.3)]
    assert Block().accept(asked([2, 0], proposal=proposal)).tolist() == [[1.0, 1.0]]
    assert Token().accept(asked([2, 0], proposal=proposal)).tolist() == [[pytest.approx(0.375), 1.0]]
