from __future__ import annotations

import numpy as np

from trencadis_plugins.sampling.min_p import MinP


def _kept(process, start, logits, **params):
    return np.flatnonzero(np.isfinite(process(MinP(), [logits], [start(0, **params)])[0].numpy())).tolist()


def test_tokens_below_a_share_of_the_largest_probability_are_dropped(process, start):
    logits = np.log([0.1, 0.5, 0.3, 0.1]).tolist()
    assert _kept(process, start, logits, min_p=0.3) == [1, 2]
    assert _kept(process, start, logits, min_p=0.19) == [0, 1, 2, 3]
    assert _kept(process, start, logits) == [0, 1, 2, 3]


def test_a_share_of_one_keeps_all_of_the_most_likely(process, start):
    assert _kept(process, start, [3.7, 1.0, 3.7], min_p=1.0) == [0, 2]
