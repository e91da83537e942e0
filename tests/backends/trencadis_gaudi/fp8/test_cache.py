from __future__ import annotations

import json

import attrs
import numpy as np
import pytest
import torch

from support.backends import tiny_models
from support.backends.fp8_scene import measure, rounded
from trencadis.clock import SystemClock
from trencadis.errors import ModelLoadError
from trencadis.records import ModelSource
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.flat_cache import CacheScales, FlatKVCache
from trencadis_gaudi.fp8.cache import cache_layers
from trencadis_gaudi.fp8.measurements import read_measurements
from trencadis_gaudi.fp8.methods import STATIC
from trencadis_gaudi.fp8.scales import FP8, GAUDI2
from trencadis_gaudi.habana import load_habana
from trencadis_gaudi.model import load_model
from trencadis_kv.store.identity import compat_id
from trencadis_torch.cache.kv_cache import AttentionLayer
from trencadis_torch.loading.inspection import attention_layers

PLAIN = tuple(
    AttentionLayer(index=index, num_kv_heads=2, key_dim=3, value_dim=4, window=0, dtype=torch.float32)
    for index in (1, 4)
)
STORED = tuple(attrs.evolve(layer, dtype=FP8) for layer in PLAIN)
SCALES = {
    index: CacheScales.of(torch.tensor(keys), torch.tensor(values), torch.float32)
    for index, keys, values in ((1, 0.5, 2.0), (4, 0.25, 16.0))
}


@pytest.fixture
def habana():
    return load_habana(GaudiConfig(device="emulated", mode="eager", kv_cache_dtype="fp8"), clock=SystemClock())


def make(habana, layers=STORED, scales=SCALES):
    return FlatKVCache(layers, num_blocks=5, block_size=4, device=habana.device, scales=scales)


def expected(values, scale):
    return rounded((values / scale).numpy()) * scale


def test_keys_and_values_come_back_rounded_each_by_its_scale(habana):
    cache, generator = make(habana), torch.Generator().manual_seed(0)
    slots = torch.tensor([9, 2, 23])
    for layer in STORED:
        flat, scales = cache.flat_layer(layer.index), SCALES[layer.index]
        keys, values = (torch.randn(3, 2, dim, generator=generator) * 100 for dim in (3, 4))
        cache.write(layer.index, slots.to("hpu"), keys.to("hpu"), values.to("hpu"))
        for read in (flat.gather(torch.tensor([2, 0, 5]).to("hpu")), flat.first(6)):
            blocks = [2, 0, 5] if len(read[0]) == 3 else range(6)
            places = [(list(blocks).index(slot // 4), slot % 4) for slot in slots.tolist()]
            for found, new, scale in zip(read, (keys, values), (scales.keys, scales.values), strict=True):
                assert (found.dtype, found.shape[1]) == (torch.float32, 4)
                stored = torch.stack([found.cpu()[block, offset] for block, offset in places])
                assert np.array_equal(stored.numpy(), expected(new, float(scale)))


def test_planted_fault_of_a_scale_is_noticed(habana):
    """Inverted, or that of the values for the keys."""
    keys = torch.full((1, 2, 3), 50.0).to("hpu")
    values = torch.full((1, 2, 4), 50.0).to("hpu")
    good = SCALES[4]
    mutants = (
        attrs.evolve(good, inverses=(good.keys, good.values)),
        attrs.evolve(good, inverses=good.inverses[::-1]),
        attrs.evolve(good, keys=good.values),
    )
    for scales, is_wrong in ((good, False), *((mutant, True) for mutant in mutants)):
        cache = make(habana, scales={1: SCALES[1], 4: scales})
        cache.write(4, torch.tensor([0]).to("hpu"), keys, values)
        found = [part.cpu()[0, 0, 0, 0].item() for part in cache.flat_layer(4).first(1)]
        assert (found != pytest.approx([50, 50], rel=2**-4)) is is_wrong


def test_beyond_the_range_the_largest_number_is_stored(habana):
    cache = make(habana, scales={1: SCALES[1], 4: SCALES[4]})
    huge = torch.full((1, 2, 3), -1e6).to("hpu")
    cache.write(1, torch.tensor([0]).to("hpu"), huge, torch.zeros(1, 2, 4).to("hpu"))
    assert cache.flat_layer(1).first(1)[0].cpu().min() == -240 * 0.5


def test_blocks_move_as_bytes_and_no_store_takes_them_for_others(habana):
    cache, plain = make(habana), make(habana, layers=PLAIN, scales=None)
    assert plain.layout.block_bytes == 4 * cache.layout.block_bytes
    for part in cache.parts:
        part.copy_(torch.arange(part.numel(), dtype=torch.float32).view_as(part) % 200)
    data = np.empty((2, cache.layout.block_bytes), np.uint8)
    cache.read_blocks([3, 1], data)
    cache.write_blocks([0, 4], data)
    gathered = cache.gather(torch.tensor([3, 1]).to("hpu"))
    cache.scatter(torch.tensor([2, 5]).to("hpu"), gathered)
    cache.copy_blocks(torch.tensor([3]).to("hpu"), torch.tensor([5]).to("hpu"))
    for part in cache.parts:
        blocks = part.cpu().float()
        assert torch.equal(blocks[[0, 4]], blocks[[3, 1]])
        assert torch.equal(blocks[[2, 5]], blocks[[3, 3]])
        assert not torch.equal(blocks[0], blocks[4])
    ids = {compat_id(one.layout, identity="model", exact_numerics=exact) for one in (cache, plain) for exact in (0, 1)}
    assert len(ids) == 4
    bfloat16 = tuple(attrs.evolve(layer, dtype=torch.bfloat16) for layer in PLAIN)
    assert make(habana, layers=bfloat16, scales=None).layout.block_bytes == 2 * cache.layout.block_bytes


def measured(tmp_path, kind="llama"):
    model = tiny_models.make_model(kind)
    path = measure(model, torch.tensor([tiny_models.prompt(50)]), tmp_path / "measure", caches=True)
    return model, attention_layers(model), path


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_scales_are_one_without_measurements_of_the_cache(kind):
    model = tiny_models.make_model(kind)
    layers, scales, digest = cache_layers(model, attention_layers(model), GAUDI2, STATIC["maxabs_hw"], None)
    assert {layer.dtype for layer in layers} == {FP8}
    assert [float(scale.keys * scale.values) for scale in scales.values()] == [1.0] * 3
    assert digest == ""


def test_scales_follow_from_what_was_measured(tmp_path):
    model, layers, path = measured(tmp_path)
    nodes = json.loads(path.read_text())["Nodes"]
    for name, step in (("maxabs_pow2", 1.0), ("maxabs_hw", 4.0)):
        _, scales, digest = cache_layers(model, layers, GAUDI2, STATIC[name], read_measurements(str(path)))
        for index, pair in scales.items():
            for kind, scale in (("k", pair.keys), ("v", pair.values)):
                maxabs = nodes[f"model.layers.{index}.self_attn.attn.impl.{kind}_cache"]["inputs"][0][0][0]
                assert 60 * float(scale) >= maxabs > 60 * float(scale) / 2.0**step
        assert digest


def test_layer_that_was_not_measured_while_others_were_is_refused(tmp_path):
    model, layers, path = measured(tmp_path)
    content = json.loads(path.read_text())
    for kind in "kv":
        del content["Nodes"][f"model.layers.1.self_attn.attn.impl.{kind}_cache"]
    path.write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=r"0_1\.json: layer model\.layers\.1\.self_attn: its k_cache and v_cache"):
        cache_layers(model, layers, GAUDI2, STATIC["maxabs_hw"], read_measurements(str(path)))


def test_facts_of_a_model_tell_scales_apart_and_count_bytes(model_path, tmp_path):
    path = model_path("llama")
    _, _, file = measured(tmp_path)

    def facts(**options):
        habana = load_habana(GaudiConfig(device="emulated", mode="eager", **options), clock=SystemClock())
        return load_model(ModelSource(path=str(path)), habana, check=False).facts

    static = {"fp8": "static", "fp8_measurements": str(file)}
    found = [
        facts(),
        facts(kv_cache_dtype="fp8"),
        facts(kv_cache_dtype="fp8", fp8_measurements=str(file)),
        facts(fp8="dynamic"),
        facts(**static),
        facts(**static, fp8_scale_method="maxabs_pow2"),
    ]
    prints = [one.fingerprint for one in found]
    assert prints[0] == prints[1]  # told apart by the layout
    assert len(set(prints)) == 5
    assert [found[0].kv_bytes_per_token / one.kv_bytes_per_token for one in found] == [1, 4, 4, 1, 1, 1]
    assert {one.num_parameters for one in found} == {found[0].num_parameters}
    assert found[3].weights_bytes < found[0].weights_bytes / 2
