from __future__ import annotations

import numpy as np
import pytest
import torch

from trencadis_plugins.sampling.philox import Purpose, uniforms
from trencadis_plugins.sampling.xtc import Xtc

_LOGITS = np.log([0.4, 0.05, 0.3, 0.15, 0.1]).tolist()


def _kept(row):
    return np.flatnonzero(np.isfinite(np.asarray(row))).tolist()


@pytest.mark.parametrize(
    ("threshold", "kept"), [(0.09, [1, 4]), (0.2, [1, 2, 3, 4]), (0.35, [0, 1, 2, 3, 4]), (0.01, [1])]
)
def test_all_but_the_least_likely_of_the_likely_ones_are_dropped(threshold, kept, process, start):
    changed = process(Xtc(), [_LOGITS], [start(0, xtc_probability=1.0, xtc_threshold=threshold)])
    assert _kept(changed[0]) == kept


def test_of_equal_ones_the_highest_id_stays(process, start):
    changed = process(Xtc(), [[1.0, 1.0, 1.0, -9.0]], [start(0, xtc_probability=1.0)])
    assert _kept(changed[0]) == [2, 3]


def test_it_happens_as_often_as_asked_and_when_the_seed_and_position_say(process, start):
    starts = [start(row, [0], [0] * (row % 7), row_seed=row, xtc_probability=0.3) for row in range(600)]
    changed = process(Xtc(), [_LOGITS] * 600, starts)
    happened = [not np.isfinite(row[0]) for row in changed.tolist()]
    keys = torch.tensor([[row, 0] for row in range(600)])
    positions = torch.tensor([1 + row % 7 for row in range(600)])
    numbers = uniforms(keys, positions, purpose=Purpose.EXCLUDE, count=1)[:, 0]
    assert happened == (numbers < 0.3).tolist()
    assert 140 < sum(happened) < 220


def test_its_numbers_are_not_those_of_the_draw():
    keys, positions = torch.tensor([[5, 0]]), torch.tensor([3])
    assert not torch.equal(
        uniforms(keys, positions, purpose=Purpose.EXCLUDE, count=2),
        uniforms(keys, positions, purpose=Purpose.SAMPLE, count=2),
    )


def test_rows_that_cannot_lose_a_token_do_not_ask(start):
    assert not Xtc().applies_to(start(0, xtc_probability=1.0, xtc_threshold=0.51))
    assert not Xtc().applies_to(start(0, xtc_probability=1.0, temperature=0))
    assert not Xtc().applies_to(start(0))
