from __future__ import annotations

import pytest
import torch

from support.backends import tiny_models
from trencadis.clock import SystemClock
from trencadis.interfaces import AllocationPlan
from trencadis.records import Bucket, Phase
from trencadis_gaudi.attention.adapter import FLAT, register
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.device_rows import DeviceRows, HostTables
from trencadis_gaudi.flat_cache import FlatKVCache
from trencadis_gaudi.graphs.model import (
    ForwardAdapter,
    decoder_layers,
    dynamo_limits,
    make_forward,
    mark_layers,
    prepare_layers,
)
from trencadis_gaudi.habana import load_habana
from trencadis_gaudi.passes.tensors import GaudiPasses
from trencadis_gaudi.runner import empty_pass
from trencadis_torch.attention import adapter
from trencadis_torch.loading.inspection import attention_layers

PLAN = AllocationPlan(num_blocks=8, block_size=16, num_rows=3, max_model_len=40, max_num_batched_tokens=32)
DECODE = Bucket(2, 1, 4, Phase.DECODE)


class World:
    def __init__(self, kind="llama", **options):
        self.config = GaudiConfig(device="emulated", **{"mode": "lazy", **options})
        self.habana = load_habana(self.config, clock=SystemClock())
        register()
        model = tiny_models.make_model(kind)
        layers = attention_layers(model)
        adapter.switch(model, FLAT)
        cache = FlatKVCache(layers, num_blocks=8, block_size=16, device=self.habana.device)
        self.passes = GaudiPasses(cache, contiguous=False)
        self.rows = DeviceRows(PLAN, self.habana)
        self.adapter = ForwardAdapter(model.to(self.habana.device), self.passes)
        prepare_layers(self.adapter.model, self.config, self.habana)
        self.forward = make_forward(self.adapter, self.config, self.habana)

    def inputs(self, bucket):
        inputs = self.passes.inputs(empty_pass(bucket), self.rows, HostTables(3, 4).blocks)
        keep = torch.zeros(bucket.batch_size, dtype=torch.int64, device=self.habana.device)
        return inputs.token_ids, inputs.positions, keep, inputs.tensors

    @torch.inference_mode()
    def logits(self, bucket, *, graph):
        with self.habana.active():
            inputs = self.inputs(bucket)
            self.habana.mark_step()
            before = self.habana.emulated.num_compilations
            logits = self.forward(*inputs, graph=graph)
            self.habana.mark_step()
        return logits.cpu(), self.habana.emulated.num_compilations - before


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_modes_give_the_same_logits(kind):
    found = [World(kind, mode=mode).logits(DECODE, graph=True)[0] for mode in ("lazy", "eager")]
    assert found[0].shape == (2, tiny_models.VOCAB_SIZE)
    torch.testing.assert_close(found[0], found[1])


def test_lazy_forward_is_one_graph_a_bucket():
    world = World(mark_layers=1)
    first, compiled = world.logits(DECODE, graph=True)
    again, none = world.logits(DECODE, graph=True)
    assert (compiled, none) == (1, 0)
    torch.testing.assert_close(first, again)
    assert world.logits(Bucket(2, 16, 0), graph=True)[1] == 1


def test_layers_without_a_graph_share_their_recipes():
    """Three layers of one shape are marked alike: what differs is the first run, a layer between, and the last."""
    world = World(mark_layers=1)
    compiled = world.logits(DECODE, graph=False)[1]
    assert 3 <= compiled <= 4
    assert world.logits(DECODE, graph=False)[1] == 0
    assert World(mark_layers=0).logits(DECODE, graph=False)[1] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("regional", "graphs"), [(True, 3), (False, 1)])
def test_compile_mode_compiles_layers_or_the_whole(regional, graphs):
    world = World(mode="compile", regional=regional)
    keys = world.habana.emulated._recipes
    plain = World(mode="eager").logits(DECODE, graph=True)[0]
    logits = world.logits(DECODE, graph=True)[0]
    torch.testing.assert_close(logits, plain)
    assert 1 <= sum(key.startswith(b"compiled") for key in keys) <= graphs
    before = len(keys)
    world.logits(DECODE, graph=True)
    assert len(keys) == before


def test_every_nth_layer_is_marked():
    for every, count in ((0, 0), (1, 3), (2, 1), (3, 1), (4, 0)):
        model, marks = tiny_models.make_model("qwen3"), []
        assert mark_layers(model, lambda marks=marks: marks.append(1), every=every) == count
        with torch.inference_mode():
            model(torch.ones(1, 2, dtype=torch.long), use_cache=False)
        assert len(marks) == count


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox", "mixtral", "gemma3"])
def test_decoder_layers_are_found_in_every_architecture(kind):
    assert len(decoder_layers(tiny_models.make_model(kind))) == 3


def test_limits_of_torch_compile_are_the_vendors():
    assert dynamo_limits(207, regional=True) == (1036, 8288)
    assert dynamo_limits(207, regional=False) == (208, 1664)
