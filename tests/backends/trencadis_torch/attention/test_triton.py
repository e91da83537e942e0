from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch

from support.backends import paged_attention_scene
from support.backends.paged_attention_scene import Sequence, Shape, chain_and_trees
from support.devices import DEVICE
from trencadis_torch.attention.triton import FEW, MAX_SPANS, TritonAttention, num_spans, obstacle, tile_for
from trencadis_torch.cache.kv_cache import AttentionLayer

HERE = torch.device(DEVICE)
LAYER = AttentionLayer(index=2, num_kv_heads=1, key_dim=8, value_dim=8, window=0, dtype=torch.float32)


@pytest.fixture
def kernel():
    pytest.importorskip("triton", reason="triton is not installed: its kernels cannot be interpreted")
    if obstacle((LAYER,), HERE) is not None:
        pytest.skip("TRITON_INTERPRET is 0: kernels are compiled for a GPU")
    return TritonAttention(8)


def attend(*args, sinks=None, **options):
    return paged_attention_scene.attend(*args, device=HERE, sinks=None if sinks is None else sinks.to(HERE), **options)


def batch(shape, places):
    return [Sequence(shape, context=c, length=n, seed=i) for i, (c, n) in enumerate(places)]


# Contexts around key tiles of 64 and spans of 128; lengths of one query, of a few, and of more than one tile of rows.
CASES = {
    "decodes, shared out": (Shape(), [(300, 1)], {}),
    "decodes of several lengths": (Shape(block_size=16, groups=3), [(63, 1), (64, 1), (129, 1), (0, 1)], {}),
    "drafts": (Shape(block_size=16), [(140, 3), (5, 5), (0, 2)], {}),
    "prompt and chunk": (Shape(num_kv_heads=1, block_size=16), [(0, 40), (70, 33)], {}),
    "all kinds": (Shape(num_kv_heads=1, block_size=3), [(20, 20), (130, 1), (4, 3), (0, 17)], {}),
    "odd heads": (Shape(num_kv_heads=1, groups=7, key_dim=24, value_dim=20), [(65, 1), (9, 4)], {}),
    "window": (Shape(window=3, num_kv_heads=1), [(200, 1), (3, 20)], {}),
    "window beyond a span": (Shape(window=150, num_kv_heads=1, block_size=16), [(400, 2)], {}),
    "softcap": (Shape(num_kv_heads=1), [(150, 1), (0, 18)], {"softcap": 1.5}),
    "scale": (Shape(num_kv_heads=1), [(10, 1)], {"scale": 0.7}),
    "sinks": (Shape(), [(150, 1), (0, 18), (0, 1)], {"sinks": torch.linspace(-2.0, 3.0, 4)}),
}


@pytest.mark.parametrize("name", CASES)
def test_kernel_agrees_with_gathering(kernel, name):
    shape, places, options = CASES[name]
    found, cache = attend(shape, batch(shape, places), native=kernel, strided=True, **options)
    expected, reference = attend(shape, batch(shape, places), native=False, **options)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(part, other) for part, other in zip(cache.parts, reference.parts, strict=True))


@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.bfloat16, torch.int8], ids=str)
def test_narrow_caches_are_read_as_the_reference_does(kernel, cache_dtype):
    shape = Shape(num_kv_heads=2, key_dim=20, value_dim=12, block_size=16, cache_dtype=cache_dtype)
    # Chunks with context: whole prompts the reference lets attend to what was not rounded yet.
    places = [(150, 1), (7, 18)]
    found, _ = attend(shape, batch(shape, places), native=kernel)
    expected, _ = attend(shape, batch(shape, places), native=False)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_model_of_16_bits_stays_near_float32(kernel):
    """In float16: the interpreter cannot multiply matrices of bfloat16, which are compiled alike."""
    dtype = torch.float16
    shape = Shape(num_kv_heads=1, key_dim=16, value_dim=16, dtype=dtype, cache_dtype=dtype)
    sequences = batch(shape, [(140, 1), (3, 17)])
    found, _ = attend(shape, sequences, native=kernel)
    assert found.dtype is dtype
    for one in sequences:
        one.keys, one.values, one.query = one.keys.float(), one.values.float(), one.query.float()
    exact = attrs.evolve(shape, dtype=torch.float32, cache_dtype=torch.float32)
    expected, _ = attend(exact, sequences, native=False)
    # Weights and outputs are rounded once each; values are of the order of 1.
    assert float((found.float() - expected).abs().max()) < 2.5 * torch.finfo(dtype).eps


def test_branching_drafts_are_gathered_and_the_rest_is_not(kernel):
    shape, lengths = Shape(num_kv_heads=1, block_size=16), [4, 1, 5]
    trees = chain_and_trees(lengths, [True, False, False], seed=3)
    places = [(30, 4), (140, 1), (9, 5)]
    found, _ = attend(shape, batch(shape, places), native=kernel, trees=trees)
    expected, _ = attend(shape, batch(shape, places), native=False, trees=trees)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_result_does_not_depend_on_how_keys_are_shared_out(kernel):
    shape, places = Shape(num_kv_heads=1, block_size=16), [(300, 1), (40, 2)]
    one, many = (attend(shape, batch(shape, places), native=TritonAttention(n))[0] for n in (0, 100))
    torch.testing.assert_close(one, many, atol=1e-6, rtol=1e-5)


def test_spans_keep_processors_busy_and_no_more():
    assert [num_spans(programs, 100) for programs in (1, 8, 13, 100, 101, 200, 201, 5000)] == [
        32,
        32,
        16,
        4,
        2,
        2,
        1,
        1,
    ]
    assert num_spans(1, 10**6) == MAX_SPANS
    assert num_spans(1, 0) == 1


def test_tiles_hold_whole_queries_and_are_of_three_kinds():
    for groups, dims, item_bytes in itertools.product(
        [1, 3, 4, 7, 71], [(64, 64), (192, 128), (512, 512), (8, 6)], [2, 4]
    ):
        kinds = []
        for most in range(1, 600):
            tile = tile_for(groups=groups, most_queries=most, key_dim=dims[0], value_dim=dims[1], item_bytes=item_bytes)
            assert tile.rows >= max(16, tile.queries * groups)
            assert tile.queries >= 1
            assert tile.rows & (tile.rows - 1) == tile.keys & (tile.keys - 1) == 0
            if tile not in kinds:
                kinds.append(tile)
                assert most in (1, 2, FEW + 1)
        assert len(kinds) <= 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"key_dim": 513}, "more than 512"),
        ({"dtype": torch.int8, "value_dim": 6}, "int8 takes fours"),
        ({"dtype": torch.float64}, "float64"),
    ],
)
def test_layers_beyond_the_kernels_are_named_with_the_reason(changes, reason):
    layers = (LAYER, attrs.evolve(LAYER, index=5, **changes))
    found = obstacle(layers, torch.device("cuda:0"))
    assert found is not None
    assert reason in found or "triton is missing" in found
    assert ("layer 5" in found) == ("triton" not in found)


SCRIPT = Path(__file__).parents[3] / "support/backends/compiled_for_gpu.py"


@pytest.mark.parametrize(("capability", "kind"), [("80", "int8"), ("90", "half")])
def test_kernels_compile_for_gpus_that_are_not_here_in_few_variants(tmp_path, capability, kind):
    """To machine code, by Triton and the assembler that it brings. What batches look like makes no variant: none is compiled late."""
    pytest.importorskip("triton", reason="triton is not installed: its kernels cannot be compiled")
    environ = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), capability, kind]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert result.returncode == 0, result.stderr[-2000:]
    name, attends, merges, shared = result.stdout.split()
    assert name == kind
    # One query, up to 16 and more; the first two with keys shared out and without.
    assert 3 <= int(attends) <= 5
    assert 1 <= int(merges) <= 2
    # What the smallest of current GPUs, of capability 8.6 and 8.9, let a program have.
    assert 0 < int(shared) <= 99 * 1024
