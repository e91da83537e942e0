from __future__ import annotations

import numpy as np
import pytest

from trencadis_plugins.sampling.temperature import Temperature
from trencadis_plugins.sampling.top_n_sigma import TopNSigma


@pytest.mark.parametrize("num_sigmas", [0.01, 0.5, 1.0, 2.5, 100.0])
def test_it_keeps_what_the_definition_keeps(num_sigmas, process, start, random_rows):
    logits = random_rows(np.random.default_rng(4), 300, 100)
    changed = process(TopNSigma(), logits, [start(row, top_n_sigma=num_sigmas) for row in range(100)]).numpy()
    for row, result in zip(logits.astype(np.float64), changed, strict=True):
        known = row[np.isfinite(row)]
        expected = row >= known.max() - num_sigmas * known.std()
        assert np.array_equal(np.isfinite(result), expected & np.isfinite(row))


def test_the_temperature_before_it_changes_nothing(process, start):
    logits = np.random.default_rng(5).normal(0, 3, (20, 200)).astype(np.float32)
    starts = [start(row, top_n_sigma=1.2, temperature=0.3 + 0.2 * row) for row in range(20)]
    before = process([Temperature(), TopNSigma()], logits, starts).numpy()
    after = process([TopNSigma(), Temperature()], logits, starts).numpy()
    assert np.array_equal(np.isfinite(before), np.isfinite(after))
