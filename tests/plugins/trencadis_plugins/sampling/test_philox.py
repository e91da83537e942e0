from __future__ import annotations

import numpy as np
import pytest
import torch

from trencadis_plugins.sampling.philox import Purpose, philox4x32, uniforms
from trencadis_testing.sampling import assert_distribution

_ONES = 0xFFFFFFFF


def _words(values):
    return torch.tensor(values, dtype=torch.int64)[:, None]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([_ONES] * 4, [_ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_published_answers_are_reproduced(counter, key, expected, reference_philox):
    assert [int(word) for word in philox4x32(_words(counter), _words(key))] == expected
    assert list(reference_philox(counter, key)) == expected


def test_random_counters_equal_whole_number_arithmetic(reference_philox):
    values = np.random.default_rng(0).integers(0, 2**32, (6, 200))
    answers = philox4x32(torch.from_numpy(values[:4]), torch.from_numpy(values[4:])).numpy()
    for i in range(200):
        assert tuple(answers[:, i]) == reference_philox(values[:4, i].tolist(), values[4:, i].tolist())


def _row(seed=5, position=3, purpose=Purpose.SAMPLE, count=4096):
    keys = torch.tensor([[seed & _ONES, seed >> 32]])
    return uniforms(keys, torch.tensor([position]), purpose=purpose, count=count)[0].numpy()


def test_numbers_are_uniform_and_never_0_or_1():
    numbers = _row(count=1 << 16)
    assert numbers.dtype == np.float64
    assert numbers.min() > 0
    assert numbers.max() < 1
    assert_distribution((numbers * 64).astype(int).tolist(), np.full(64, 1 / 64))


def test_extreme_words_stay_inside_the_open_interval(monkeypatch):
    for value, expected in ((0, 2.0**-53), (_ONES, 1 - 2.0**-53)):
        words = torch.full((4, 1, 1), value, dtype=torch.int64)
        monkeypatch.setattr("trencadis_plugins.sampling.philox.philox4x32", lambda counter, key, w=words: w)
        assert _row(count=2).tolist() == [expected, expected]


def test_a_number_does_not_depend_on_how_many_are_asked_for():
    whole = _row(count=100)
    assert _row(count=37).tolist() == whole[:37].tolist()


@pytest.mark.parametrize(
    "other",
    [
        {"purpose": Purpose.DRAFT},
        {"purpose": Purpose.ACCEPT},
        {"purpose": Purpose.RESIDUAL},
        {"position": 4},
        {"seed": 6},
        {"seed": 5 + (1 << 32)},
    ],
)
def test_numbers_of_another_purpose_position_or_seed_are_independent(other):
    cells = (_row() * 8).astype(int) * 8 + (_row(**other) * 8).astype(int)
    assert_distribution(cells.tolist(), np.full(64, 1 / 64))


def test_neighbouring_numbers_of_a_row_are_independent():
    cells = (_row() * 8).astype(int)
    assert_distribution((cells[0::2] * 8 + cells[1::2]).tolist(), np.full(64, 1 / 64))
    assert_distribution((cells[0:-2:2] * 8 + cells[2::2]).tolist(), np.full(64, 1 / 64))


def test_the_round_is_the_last_word_of_the_counter(reference_philox):
    keys, rounds = torch.tensor([[5, 6]] * 2), torch.tensor([0, 9])
    found = uniforms(keys, torch.tensor([3, 3]), purpose=Purpose.DRAFT, count=1, rounds=rounds)[:, 0].tolist()
    for value, number in zip(found, (0, 9), strict=True):
        high, low = reference_philox((3, 1, 0, number), (5, 6))[:2]
        assert value == ((high * 2**20 + low // 2**12) + 0.5) / 2**52
    plain = uniforms(keys[:1], torch.tensor([3]), purpose=Purpose.DRAFT, count=1)
    assert found[0] == plain.item()
