from __future__ import annotations

import numpy as np
import torch

from trencadis_plugins.sampling.distributions import KeyedDistributions, distributions_of
from trencadis_plugins.sampling.drawing import BLOCK_SIZE
from trencadis_plugins.sampling.philox import Purpose
from trencadis_testing.sampling import assert_distribution


def keyed(count, *, seeds=None, positions=None, vocab_size=4):
    keys = np.stack([seeds if seeds is not None else range(count), [0] * count], 1)
    distribution = torch.full((count, vocab_size), 1 / vocab_size)
    return KeyedDistributions(distribution, keys=keys, positions=positions or [5] * count)


def test_a_greedy_row_has_one_token_the_lowest_among_equals():
    logits = torch.tensor([[1.0, 2.0, 2.0, -torch.inf], [1.0, 2.0, 2.0, -torch.inf]])
    distributions = distributions_of(logits, is_greedy=torch.tensor([True, False]))
    assert distributions[0].tolist() == [0, 1, 0, 0]
    assert torch.allclose(distributions[1], logits[1].softmax(-1))
    assert distributions[1, 3] == 0


def test_numbers_are_those_of_the_seed_the_next_position_and_their_purpose(reference_philox):
    found = keyed(2, seeds=[9, 11], positions=[5, 70_000]).uniforms()
    for value, seed, position in zip(found.tolist(), (9, 11), (6, 70_001), strict=True):
        high, low = reference_philox((position, int(Purpose.ACCEPT), 0, 0), (seed, 0))[:2]
        assert value == ((high * 2**20 + low // 2**12) + 0.5) / 2**52


def test_numbers_do_not_depend_on_the_rest_of_the_call():
    together = keyed(6, positions=[3, 4, 5, 6, 7, 8])
    alone = keyed(1, seeds=[4], positions=[7])
    assert together.uniforms()[4] == alone.uniforms()[0]
    weights = torch.tensor([[1.0, 2, 3, 4]] * 6)
    drawn = together.draw(weights, torch.arange(6))
    assert alone.draw(weights[:1], torch.tensor([0]))[0] == drawn[4]
    assert torch.equal(together.draw(weights[:3], torch.tensor([5, 0, 4])), drawn[[5, 0, 4]])


def test_a_draw_is_that_of_its_own_purpose(reference_draw):
    weights = torch.rand((3, 700), generator=torch.Generator().manual_seed(0))
    found = keyed(3, seeds=[1, 2, 3], vocab_size=700).draw(weights, torch.arange(3)).tolist()
    logits = weights.log().numpy()
    expected = [reference_draw(logits[i], i + 1, 6, int(Purpose.RESIDUAL), BLOCK_SIZE) for i in range(3)]
    assert found == expected


def test_weights_need_not_sum_to_one_and_a_weight_of_zero_is_never_drawn():
    weights = torch.tensor([[0.0, 30.0, 10.0, 0.0]]).expand(4096, -1)
    drawn = keyed(4096).draw(weights, torch.arange(4096))
    assert_distribution(drawn.tolist(), np.array([0, 0.75, 0.25, 0]))
