from __future__ import annotations

import numpy as np
import pytest
import torch

from trencadis_plugins.sampling.drawing import BLOCK_SIZE, draw, num_times
from trencadis_plugins.sampling.philox import Purpose, RowNumbers
from trencadis_testing.sampling import assert_distribution


def _draw(logits, seeds, positions, purpose=Purpose.SAMPLE):
    logits = torch.tensor(np.array(logits), dtype=torch.float32)
    keys = np.array([[seed % 2**32, seed // 2**32] for seed in seeds])
    numbers = RowNumbers(keys=keys, positions=positions, device=logits.device)
    return draw(logits, logits.amax(-1), numbers.times(purpose, num_times(logits.shape[1]))).tolist()


@pytest.mark.parametrize("vocab_size", [1, 7, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE - 5])
def test_tokens_equal_a_race_run_one_number_at_a_time(vocab_size, reference_draw):
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(0, 2, (6, vocab_size)).astype(np.float32)
    seeds, positions = [int(seed) for seed in rng.integers(0, 2**63, 6)], rng.integers(0, 10**6, 6).tolist()
    expected = [
        reference_draw(row, seed, position, int(Purpose.SAMPLE), BLOCK_SIZE)
        for row, seed, position in zip(logits, seeds, positions, strict=True)
    ]
    assert _draw(logits, seeds, positions) == expected


def test_tokens_of_several_blocks_follow_the_distribution():
    logits = np.full(4 * BLOCK_SIZE, -np.inf, dtype=np.float32)
    places = [3, BLOCK_SIZE - 1, BLOCK_SIZE, 2 * BLOCK_SIZE + 9, 4 * BLOCK_SIZE - 1]
    logits[places] = [0.0, 1.0, 2.0, 0.5, 1.5]
    tokens = _draw(np.tile(logits, (2048, 1)), [11] * 2048, list(range(2048)))
    distribution = np.exp(logits[places]) / np.exp(logits[places]).sum()
    assert set(tokens) <= set(places)
    assert_distribution([places.index(token) for token in tokens], distribution)


def test_a_masked_token_is_not_drawn_even_if_it_is_all_but_one():
    logits = np.full((64, 600), -np.inf, dtype=np.float32)
    logits[:, 599] = -80.0
    assert set(_draw(logits, [2] * 64, list(range(64)))) == {599}
