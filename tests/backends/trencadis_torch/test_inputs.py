from __future__ import annotations

import numpy as np
import pytest
import torch

from trencadis.interfaces import AllocationPlan
from trencadis.records import Bucket, Pass, Phase
from trencadis_torch.attention.ragged import Workspace
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKVCache
from trencadis_torch.inputs import padded_inputs, ragged_inputs
from trencadis_torch.rows import Rows

PLAN = AllocationPlan(num_blocks=9, block_size=2, num_rows=3, max_model_len=12, max_num_batched_tokens=8)
LAYER = AttentionLayer(index=0, num_kv_heads=1, key_dim=2, value_dim=2, window=0, dtype=torch.float32)


@pytest.fixture
def state():
    rows = Rows(PLAN, torch.device("cpu"))
    rows.tokens[:, :13] = torch.arange(3)[:, None].int() * 100 + torch.arange(13).int()
    rows.tables[:, :3] = torch.tensor([[8, 0, 4], [1, 7, 5], [2, 3, 6]])
    return rows, PagedKVCache((LAYER,), num_blocks=9, block_size=2, device=torch.device("cpu"))


def one_pass(bucket):
    zeros = np.zeros(2, np.int32)
    arrays = ([2, 0], [3, 0], [2, 3])
    rows, starts, lengths = (np.array(part, np.int32) for part in arrays)
    return Pass(
        bucket=bucket,
        indices=np.arange(2, dtype=np.int32),
        rows=rows,
        starts=starts,
        query_lens=lengths,
        num_logits=zeros,
        num_prompt_logits=zeros,
    )


def test_ragged_tokens_follow_each_other(state):
    inputs = ragged_inputs(one_pass(Bucket(2, 3, 2)), *state, Workspace())
    assert inputs.token_ids.tolist() == [[203, 204, 0, 1, 2]]
    assert inputs.positions.tolist() == [[3, 4, 0, 1, 2]]
    assert inputs.firsts.tolist() == [0, 2]
    assert inputs.attention.slots.tolist() == [3 * 2 + 1, 6 * 2, 8 * 2, 8 * 2 + 1, 0]


@pytest.mark.parametrize("bucket", [Bucket(3, 4, 3), Bucket(3, 4, 7, Phase.DECODE)])
def test_padding_has_token_and_position_zero_and_its_own_block(state, bucket):
    inputs = padded_inputs(one_pass(bucket), *state)
    assert inputs.token_ids.view(3, 4).tolist() == [[203, 204, 0, 0], [0, 1, 2, 0], [0, 0, 0, 0]]
    assert inputs.positions.view(3, 4).tolist() == [[3, 4, 0, 0], [0, 1, 2, 0], [0, 0, 0, 0]]
    assert inputs.firsts.tolist() == [0, 4, 8]
    slots = inputs.attention._slots.view(3, 4)
    assert slots[0, :2].tolist() == [7, 12]
    assert slots[1, :3].tolist() == [16, 17, 0]
    padding = torch.cat([slots[0, 2:], slots[1, 3:], slots[2]])
    assert set(padding.tolist()) == {18, 19}
