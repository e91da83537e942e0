from __future__ import annotations

import numpy as np

from trencadis_plugins.sampling.top_k import TopK


def _kept(row):
    return np.flatnonzero(np.isfinite(row.numpy())).tolist()


def test_each_row_keeps_its_own_k(process, start):
    starts = [start(0, top_k=1), start(1, top_k=3), start(2, top_k=0), start(3, top_k=-1), start(4, top_k=99)]
    processed = process(TopK(), [[0, 4, 2, 3]] * 5, starts)
    assert [_kept(row) for row in processed] == [[1], [1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_ties_with_the_last_one_all_stay(process, start):
    processed = process(TopK(), [[1, 1, 1, 0], [2, 1, 1, 1]], [start(0, top_k=2), start(1, top_k=2)])
    assert [_kept(row) for row in processed] == [[0, 1, 2], [0, 1, 2, 3]]


def test_fewer_possible_tokens_than_k_all_stay(process, start):
    processed = process(TopK(), [[-np.inf, 1, 0, -np.inf]], [start(0, top_k=3)])
    assert _kept(processed[0]) == [1, 2]
