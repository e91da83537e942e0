from __future__ import annotations

import pytest

from trencadis.records import BucketLimits


@pytest.fixture
def limits() -> BucketLimits:
    """Small numbers: blocks of 4 tokens, a budget of 16, sequences of up to 32."""
    return BucketLimits(
        block_size=4,
        max_model_len=32,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_prefill_batch_size=1,
        num_blocks=64,
        contiguous=False,
        prefix_caching=True,
        max_draft_tokens=0,
    )
