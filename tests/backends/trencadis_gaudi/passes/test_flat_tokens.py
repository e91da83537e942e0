from __future__ import annotations

import pytest
import torch

from support.backends.paged_scene import make_pass
from trencadis.errors import StepFailedError
from trencadis.records import Bucket
from trencadis_gaudi.flat_cache import FlatKVCache
from trencadis_gaudi.passes.flat_tokens import flat_tokens

TABLES = torch.tensor([[5, 2], [0, 0], [3, 1]], dtype=torch.int32).numpy()
CACHE = FlatKVCache((), num_blocks=6, block_size=4, device=torch.device("cpu"))
BUCKET = Bucket(1, 8, 0)


def test_tokens_of_sequences_follow_each_other_and_padding_goes_round_the_padding_block():
    tokens = flat_tokens(make_pass(BUCKET, (2, 0), (3, 1), (2, 3)), TABLES, CACHE, num_tokens=8)
    assert tokens.groups.tolist() == [0, 0, 1, 1, 1, -1, -1, -1]
    assert tokens.positions.tolist() == [3, 4, 1, 2, 3, 0, 0, 0]
    assert tokens.slots.tolist() == [15, 4, 21, 22, 23, 25, 26, 27]
    assert tokens.firsts.tolist() == [0, 2]


def test_pass_without_sequences_is_padding_alone():
    tokens = flat_tokens(make_pass(BUCKET, (), (), ()), TABLES, CACHE, num_tokens=2)
    assert tokens.groups.tolist() == [-1, -1]
    assert tokens.slots.tolist() == [24, 25]


def test_row_that_is_too_short_is_refused():
    with pytest.raises(StepFailedError, match="row of 4 tokens has no room for the 5 tokens"):
        flat_tokens(make_pass(BUCKET, (2, 0), (3, 1), (2, 3)), TABLES, CACHE, num_tokens=4)
