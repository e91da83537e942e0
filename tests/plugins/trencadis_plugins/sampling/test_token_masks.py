from __future__ import annotations

import math

from trencadis_plugins.sampling.token_masks import AllowedTokens, BadTokens


def test_only_allowed_tokens_keep_their_logits(process, start):
    processed = process(AllowedTokens(), [[1, 2, 3, 4]] * 2, [start(0, allowed_token_ids=(3, 1, 3)), start(1)])
    assert processed.tolist() == [[-math.inf, 2, -math.inf, 4], [1, 2, 3, 4]]


def test_bad_tokens_lose_their_logits(process, start):
    processed = process(BadTokens(), [[1, 2, 3, 4]] * 2, [start(0), start(1, bad_token_ids=(0, 3))])
    assert processed.tolist() == [[1, 2, 3, 4], [-math.inf, 2, 3, -math.inf]]
