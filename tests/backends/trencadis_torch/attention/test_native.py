from __future__ import annotations

import ctypes

import attrs
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from support.backends.paged_attention_scene import CPU, Sequence, Shape, attend, chain_and_trees
from trencadis_torch.attention.choice import choose_kernel
from trencadis_torch.attention.native import MAX_HEAD_DIM, SOURCE, NativeAttention, obstacle
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKVCache
from trencadis_torch.native_build import Source, load_library, openmp_runtime

SHAPES = st.builds(
    Shape,
    num_kv_heads=st.integers(1, 3),
    groups=st.sampled_from([1, 2, 3, 4, 7]),
    key_dim=st.sampled_from([1, 8, 12, 16, 24, 64, 80, 96]),
    value_dim=st.sampled_from([1, 6, 16, 20, 64, 128]),
    window=st.sampled_from([0, 0, 1, 3, 17, 64, 65, 200]),
    block_size=st.sampled_from([1, 3, 4, 16, 128]),
)
# Contexts and lengths at and around blocks, tiles of 64 keys, items of 192 rows and spans of 512.
PLACES = st.tuples(
    st.sampled_from([0, 0, 1, 15, 16, 17, 63, 64, 65, 127, 511, 512, 513, 1100]),
    st.sampled_from([1, 1, 1, 2, 5, 16, 17, 33, 65, 130, 200]),
)
OPTIONS = st.sampled_from([{}, {"softcap": 1.5}, {"softcap": 30.0}, {"scale": 0.7}, {"sinks": True}])


def batch(shape, places, seed=0):
    return [
        Sequence(shape, context=context, length=length, seed=seed + index)
        for index, (context, length) in enumerate(places)
    ]


def with_sinks(shape, options):
    if "sinks" not in options:
        return options
    return {"sinks": torch.linspace(-2.0, 3.0, shape.num_kv_heads * shape.groups)}


@settings(max_examples=20, phases=[Phase.explicit, Phase.generate])
@given(
    shape=SHAPES,
    places=st.lists(PLACES, min_size=1, max_size=4),
    options=OPTIONS,
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_kernel_agrees_with_gathering(shape, places, options, seed, data):
    options, sequences = with_sinks(shape, options), batch(shape, places, seed)
    trees = None
    lengths = [length for _, length in places]
    if max(lengths) <= 33 and data.draw(st.booleans()):
        trees = chain_and_trees(lengths, [length > 2 and data.draw(st.booleans()) for length in lengths], seed)
    found, cache = attend(shape, sequences, native=True, trees=trees, strided=data.draw(st.booleans()), **options)
    expected, reference = attend(shape, sequences, native=False, trees=trees, **options)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for part, other in zip(cache.parts, reference.parts, strict=True):
        assert torch.equal(part, other)


@pytest.mark.parametrize("lengths", [[1, 1], [3, 40]], ids=["decodes", "chunks"])
def test_groups_larger_than_an_item_are_split(lengths):
    shape = Shape(num_kv_heads=1, groups=197, block_size=16)
    sequences = batch(shape, [(90, lengths[0]), (0, lengths[1])])
    found, _ = attend(shape, sequences, native=True)
    expected, _ = attend(shape, sequences, native=False)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_of_16_bits_are_computed_in_float32_between_their_roundings(dtype):
    shape = Shape(key_dim=24, value_dim=20, dtype=dtype, cache_dtype=dtype)
    sequences = batch(shape, [(600, 3), (0, 70)])
    found, _ = attend(shape, sequences, native=True)
    assert found.dtype is dtype
    exact = [attrs_to_float(one) for one in sequences]
    expected, _ = attend(attrs.evolve(shape, dtype=torch.float32, cache_dtype=torch.float32), exact, native=False)
    error = (found.float() - expected).abs()
    assert bool((error <= torch.finfo(dtype).eps * 0.51 * expected.abs() + 1e-5).all())


def attrs_to_float(one):
    one.keys, one.values, one.query = one.keys.float(), one.values.float(), one.query.float()
    return one


@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("dims", [(64, 64), (20, 36)], ids=["whole vectors", "remainders"])
def test_narrow_caches_are_written_and_read_as_the_reference_does(cache_dtype, dims):
    shape = Shape(key_dim=dims[0], value_dim=dims[1], groups=3, block_size=16, cache_dtype=cache_dtype)
    # Chunks with context: whole prompts the reference lets attend to what was not rounded yet.
    sequences = batch(shape, [(600, 3), (7, 70), (64, 1)])
    found, cache = attend(shape, sequences, native=True)
    expected, reference = attend(shape, sequences, native=False)
    for part, other in zip(cache.parts, reference.parts, strict=True):
        if cache_dtype is torch.int8:  # a level or a scale may be rounded the other way
            assert int((part != other).sum()) <= part.numel() // 200
        else:
            assert torch.equal(part, other)
    torch.testing.assert_close(found, expected, atol=2e-3 if cache_dtype is torch.int8 else 1e-5, rtol=0)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("window", [0, 100])
def test_bits_of_a_sequence_depend_on_nothing_but_itself(threads, window):
    """Not on its neighbours, not on threads, not on where its blocks lie."""
    shape = Shape(key_dim=24, value_dim=20, num_kv_heads=3, groups=5, window=window)
    places = [(1500, 1), (600, 70), (0, 40), (30, 4)]
    together, _ = attend(shape, batch(shape, places), native=True)
    first = 0
    for index, (context, length) in enumerate(places):
        alone = Sequence(shape, context=context, length=length, seed=index)
        for count in (1, 2, 4):
            threads(count)
            found, _ = attend(shape, [alone], native=True, seed=count)
            assert torch.equal(found, together[first : first + length])
        first += length


TEAM = """
#include <cstdint>
extern "C" int64_t run(int64_t (*attend)(const void *), const void *call, int64_t threads) {
  int64_t failed = 0;
#pragma omp parallel num_threads(threads) reduction(+ : failed)
  for (int layer = 0; layer < 3; layer++) failed += attend(call);
  return failed;
}
"""


@pytest.mark.skipif(not openmp_runtime(), reason="torch without OpenMP")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_team_that_there_is_already_attends_layer_after_layer(tmp_path, threads, count):
    (tmp_path / "team.cpp").write_text(TEAM)
    team = load_library(Source(tmp_path / "team.cpp"), directory=tmp_path)
    team.run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    library = load_library(Source(SOURCE))
    in_team = NativeAttention(library)
    address = ctypes.cast(library.trencadis_attend_in_team, ctypes.c_void_p)
    in_team._attend = lambda call: team.run(address, call, count)
    shape = Shape(key_dim=24, value_dim=20, num_kv_heads=3, groups=2, block_size=16)
    sequences = batch(shape, [(2500, 1), (0, 90), (7, 3)])
    expected, _ = attend(shape, sequences, native=True)
    threads(count)
    found, _ = attend(shape, sequences, native=in_team)
    assert torch.equal(found, expected)
    alone, _ = attend(shape, sequences[:1], native=in_team)
    assert torch.equal(alone, expected[:1])


def test_extreme_scores_stay_numbers():
    shape = Shape(key_dim=8, value_dim=8)
    (one,) = batch(shape, [(130, 2)])
    one.keys *= 1e4
    one.query *= 1e4
    found, _ = attend(shape, [one], native=True)
    expected, _ = attend(shape, [one], native=False)
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_value_that_is_no_number_shows():
    shape = Shape()
    (one,) = batch(shape, [(10, 1)])
    one.keys[3] = float("nan")
    found, _ = attend(shape, [one], native=True)
    assert found.isnan().all()


LAYER = Shape().layer


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"device": torch.device("cuda", 0)}, "cuda:0"),
        ({"layout": "padded"}, "padded"),
        ({"layers": (attrs.evolve(LAYER, key_dim=MAX_HEAD_DIM + 1),)}, "1024 elements"),
        ({"layers": (attrs.evolve(LAYER, dtype=torch.float64),)}, "float64"),
    ],
    ids=["device", "layout", "head dimension", "dtype"],
)
def test_where_the_kernel_cannot_run_there_is_a_reason(changed, reason):
    options = {"device": CPU, "layout": "ragged", "layers": (LAYER,)}
    assert obstacle(**options) is None
    assert reason in obstacle(**{**options, **changed})


def test_blocks_of_both_ways_to_attend_are_told_apart() -> None:
    """They differ in low bits: a store must not hand out one for the other."""
    layer = AttentionLayer(index=0, num_kv_heads=1, key_dim=8, value_dim=8, window=0, dtype=torch.float32)
    kernel = choose_kernel("auto", device=CPU, layout="ragged", layers=(layer,))
    if kernel is None:
        pytest.skip("there is no C++ compiler on this machine")
    caches = [PagedKVCache((layer,), num_blocks=1, block_size=4, device=CPU, kernel=one) for one in (None, kernel)]
    assert [cache.layout.numerics for cache in caches] == ["torch-cpu", "native-cpu"]
