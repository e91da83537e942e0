from __future__ import annotations

import math

from trencadis_plugins.sampling.logit_bias import LogitBias


def test_bias_is_added_to_the_named_tokens(process, start):
    starts = [start(0, logit_bias={1: 2.5, 3: -100}), start(1), start(2, logit_bias={0: 1})]
    logits = [[1, 2, 3, 4], [1, 2, 3, 4], [-math.inf, 2, 3, 4]]
    assert process(LogitBias(), logits, starts).tolist() == [[1, 4.5, 3, -96], [1, 2, 3, 4], [-math.inf, 2, 3, 4]]
