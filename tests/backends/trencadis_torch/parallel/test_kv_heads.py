"""What a rank says that it holds of a block is what it holds: those layers and heads of the block that one rank computes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from support.backends import tiny_models
from support.backends.families import DIFFERING_KV_HEADS, SERVED, save_with_biases
from support.backends.torch_backends import make_torch
from trencadis.errors import BackendError
from trencadis.interfaces import AllocationPlan
from trencadis.records import ModelSource
from trencadis_testing.backend import ArgmaxSampler
from trencadis_testing.driver import BackendDriver

PLAN = AllocationPlan(num_blocks=20, block_size=4, num_rows=4, max_model_len=60, max_num_batched_tokens=64)
PROMPTS = {0: tiny_models.prompt(19), 1: tiny_models.prompt(5, seed=1)}

UNDIVIDED = {
    *("biogpt", "bitnet", "ctrl", "gpt-sw3", "gpt2", "gpt_bigcode", "jetmoe", "modernbert-decoder", "opt", "persimmon"),
}
"""Without a plan of tensors in transformers."""


def computed(backend, path):
    """Let a backend compute a few prompts."""
    backend.load(ModelSource(path=str(path)), sampler=ArgmaxSampler())
    backend.allocate(PLAN)
    BackendDriver(backend, PLAN, seed=0).generate(PROMPTS, 3)
    return backend


def held(pool):
    """Return keys and values by layer and kind, ``[num_blocks, block_size, num_heads, head_dim]``."""
    layout, start, found = pool.layout, 0, {}
    data = np.empty((PLAN.num_blocks, layout.block_bytes), np.uint8)
    pool.read_blocks(range(PLAN.num_blocks), data)
    for part in layout.parts:
        size = layout.block_size * part.token_bytes
        rows = np.ascontiguousarray(data[:, start : start + size]).view(part.dtype)
        found[part.layer, part.kind] = rows.reshape(-1, layout.block_size, part.num_heads, part.head_dim)
        start += size
    return found


def assert_parts(ranks, alone):
    """Compare what ranks hold with those parts of what one rank holds."""
    whole = held(alone.kv_cache())
    covered = {name: set() for name in whole}
    for rank in ranks:
        layout = rank.kv_cache().layout
        for name, found in held(rank.kv_cache()).items():
            expected = whole[name][:, :, layout.first_head : layout.last_head]
            assert found.shape == expected.shape
            assert float(np.abs(found - expected).max()) <= 1e-4 * max(1.0, float(np.abs(expected).max())), name
            covered[name] |= set(range(layout.first_head, layout.last_head))
    assert all(heads == set(range(whole[name].shape[2])) for name, heads in covered.items())


@pytest.mark.representatives(1, ci=2)
@pytest.mark.parametrize(
    ("kind", "size"), [*zip((kind for kind in SERVED if kind not in UNDIVIDED), itertools.cycle((2, 4)), strict=False)]
)
def test_ranks_hold_the_heads_that_they_name(tmp_path, ranked, kind, size):
    path = save_with_biases(kind, tmp_path)
    backend = computed(ranked(make_torch, size), path)
    if kind in DIFFERING_KV_HEADS:
        with pytest.raises(BackendError, match="differ in their KV heads"):
            backend.ranks.all[0].kv_cache()
        return
    assert_parts(backend.ranks.all, computed(make_torch(), path))


@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    ("kind", "layout"), [("gemma3", (2, 2)), ("gemma3", (1, 2)), ("llama", (2, 2)), ("llama", (1, 2))]
)
def test_stages_hold_the_layers_that_they_name(model_path, ranked, kind, layout):
    size, stages = layout
    path = model_path(kind)
    assert_parts(computed(ranked(make_torch, size, pipeline=stages), path).ranks.all, computed(make_torch(), path))
