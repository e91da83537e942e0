from __future__ import annotations

import numpy as np
import pytest
import torch

from support.backends import tiny_models
from support.backends.passes import make_pass
from trencadis.clock import SystemClock
from trencadis.interfaces import AllocationPlan
from trencadis.records import Bucket, Phase, UnifiedBucket
from trencadis_gaudi.attention.adapter import FLAT, register
from trencadis_gaudi.attention.fused_sdpa import emulated_fused_sdpa
from trencadis_gaudi.emulated import EmulatedDevice
from trencadis_gaudi.emulated.graphs import input_hash
from trencadis_gaudi.emulated.surface import emulated_habana
from trencadis_gaudi.emulated.tensor import hpu
from trencadis_gaudi.flat_cache import FlatKVCache
from trencadis_gaudi.passes.tensors import GaudiPasses
from trencadis_torch.attention import adapter
from trencadis_torch.attention.ragged import Workspace
from trencadis_torch.cache.kv_cache import PagedKVCache
from trencadis_torch.inputs import ModelInputs
from trencadis_torch.loading.inspection import attention_layers
from trencadis_torch.rows import Rows
from trencadis_torch.runner import PassRunner

CPU = torch.device("cpu")
PLAN = AllocationPlan(num_blocks=44, block_size=4, num_rows=4, max_model_len=40, max_num_batched_tokens=64)

STEPS = (
    # Prompts, then chunks behind them, then one decode each, then decodes with drafts.
    ((0, 1, 3), (0, 0, 0), (9, 4, 2)),
    ((0, 3), (9, 2), (3, 7)),
    ((0, 1, 3), (12, 4, 9), (1, 1, 1)),
    ((1, 0, 3), (5, 13, 10), (3, 1, 2)),
)


class World:
    """A tiny model with its rows, and a cache of its own for every way of computing."""

    def __init__(self, kind, device=CPU):
        adapter.register()
        register()
        self.device = device
        self.model = tiny_models.make_model(kind)
        self.layers = attention_layers(self.model)
        self.model.to(device)
        self.rows = Rows(PLAN, device)
        self.rows.tokens[:] = (
            torch.arange(self.rows.tokens.numel()).view(self.rows.tokens.shape).int().to(device) * 7 % 100 + 3
        )
        blocks = torch.randperm(44, generator=torch.Generator().manual_seed(2)).int()
        self.rows.tables[:, :11] = blocks.view(4, 11).to(device)
        self.tables = self.rows.tables.cpu().numpy()

    def runner(self, cache):
        return PassRunner(self.model, rows=self.rows, cache=cache, layout="padded", workspace=Workspace())

    def cache(self, cache_class):
        return cache_class(self.layers, num_blocks=PLAN.num_blocks, block_size=PLAN.block_size, device=self.device)

    def expected(self):
        """Logits of every token of every step, by the torch backend's padded passes."""
        adapter.switch(self.model, adapter.PAGED)
        runner = self.runner(self.cache(PagedKVCache))
        found = []
        for index, step in enumerate(STEPS):
            one = make_pass(bucket_of("gathered", index), *step)
            found.append(self.logits(runner, runner.inputs(one), step))
        return found

    def logits(self, runner, inputs, step):
        tokens = np.concatenate([first + np.arange(n) for first, n in zip(inputs.firsts, step[2], strict=False)])
        with torch.inference_mode():
            return runner.forward(inputs, tokens.astype(np.int64))

    def attach(self, passes):
        adapter.switch(self.model, FLAT)
        passes.attach(self.model)

    def found(self, cache, inputs, passes, step):
        self.attach(passes)
        attention = passes.attention(inputs.tensors)
        whole = ModelInputs(
            token_ids=inputs.token_ids, positions=inputs.positions, attention=attention, firsts=inputs.firsts
        )
        return self.logits(self.runner(cache), whole, step)


LAYOUTS = {
    "gathered": {"contiguous": False},
    "by range": {"contiguous": True, "kernel": emulated_fused_sdpa},
    "merged": {"contiguous": False, "merged_prefill": True},
    "merged in the kernel": {"contiguous": False, "merged_prefill": True, "kernel": emulated_fused_sdpa},
    "unified": {"contiguous": False},
}


def bucket_of(layout, index):
    if layout == "unified":
        return UnifiedBucket(20, 12, 44, is_causal=index != 2)
    if index >= 2:
        return Bucket(4, 1 if index == 2 else 3, 44, Phase.DECODE)
    return Bucket(1, 20, 9) if "merged" in layout else Bucket(4, 10, 4)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gemma2", "gpt_oss"])
def test_logits_equal_those_of_the_torch_backend_in_every_layout(kind):
    world = World(kind)
    expected = world.expected()
    for layout, options in LAYOUTS.items():
        cache = world.cache(FlatKVCache)
        passes = GaudiPasses(cache, **options)
        for index, step in enumerate(STEPS):
            inputs = passes.inputs(make_pass(bucket_of(layout, index), *step), world.rows, world.tables)
            found = world.found(cache, inputs, passes, step)
            torch.testing.assert_close(found, expected[index], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("merged", [False, True])
def test_tokens_and_positions_of_padding_are_zero(merged):
    world = World("llama")
    passes = GaudiPasses(world.cache(FlatKVCache), contiguous=False, merged_prefill=merged)
    bucket = Bucket(1, 6, 1) if merged else Bucket(2, 3, 1)
    inputs = passes.inputs(make_pass(bucket, (2, 1), (3, 0), (2, 1)), world.rows, world.tables)
    first, second, third = world.rows.tokens[2, 3], world.rows.tokens[2, 4], world.rows.tokens[1, 0]
    gap = [] if merged else [0]
    expected = [[first, second, *gap, third, 0, 0], [3, 4, *gap, 0, 0, 0]]
    assert inputs.token_ids[0].tolist() == [*expected[0], 0][:6]
    assert inputs.positions[0].tolist() == [*expected[1], 0][:6]
    assert inputs.firsts.tolist() == ([0, 2] if merged else [0, 3])


class Graphed(torch.nn.Module):
    """What a graph holds: the model, and attention made from tensors alone."""

    def __init__(self, model, passes):
        super().__init__()
        self.model, self.passes = model, passes

    def forward(self, token_ids, positions, tensors):
        options = {adapter.PASS_ARGUMENT: self.passes.attention(tensors)}
        return self.model(input_ids=token_ids, position_ids=positions, use_cache=False, **options).logits


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_graph_serves_every_pass_of_its_bucket(layout):
    """Warmed up with padding alone. The emulated device refuses host reads and data-dependent shapes within a graph, a replay of
    other operations than were captured, and, once frozen, anything to compile.
    """
    device = EmulatedDevice(total_bytes=1 << 30, lazy=True, clock=SystemClock())
    habana, recorder = emulated_habana(device)
    world = World("gemma3", hpu())
    passes = GaudiPasses(world.cache(FlatKVCache), **LAYOUTS[layout])
    world.attach(passes)
    recorder.mark()  # the zeros of the cache
    graphed = habana.hpu.wrap_in_hpu_graph(Graphed(world.model, passes), disable_tensor_cache=True)
    decode = 2 if layout == "unified" else 3

    def inputs(step, index):
        return passes.inputs(make_pass(bucket_of(layout, index), *step), world.rows, world.tables)

    def run(step, index):
        made = inputs(step, index)
        recorder.mark()
        return graphed(made.token_ids, made.positions, made.tensors)

    with torch.inference_mode(), recorder.active():
        outputs = [run(((), (), ()), index) for index in (0, decode)]
        device.frozen = True
        outputs += [run(step, 0) for step in STEPS[:2]]
        outputs += [run(step, decode) for step in (STEPS[2], STEPS[decode])]
        recorder.mark()
    assert all(output.cpu().isfinite().all() for output in outputs)
    # Four replays of two graphs, and the recipe of what runs before each.
    assert device.num_recipe_hits >= 8
    assert input_hash(inputs(STEPS[0], 0).tensors) != input_hash(inputs(STEPS[2], decode).tensors)
