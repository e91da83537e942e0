from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st

from support.backends.paged_scene import OPTIONS, Scene
from trencadis.errors import StepFailedError
from trencadis.records import Bucket, Phase
from trencadis_gaudi.flat_cache import FlatKVCache
from trencadis_gaudi.passes.decode import GaudiDecode, decode_tensors
from trencadis_torch.attention.options import AttentionOptions


def bucket(batch_size, query_len, num_blocks):
    return Bucket(batch_size, query_len, num_blocks, Phase.DECODE)


def shapes(value):
    return tuple(value.shape) if isinstance(value, torch.Tensor) else [shapes(item) for item in value]


def run(scene, one, *, contiguous, **options):
    tensors = decode_tensors(one, scene.tables, scene.cache, contiguous=contiguous)
    attention = GaudiDecode(scene.cache, tensors, contiguous=contiguous)
    firsts = np.arange(one.bucket.batch_size) * one.bucket.query_len
    return scene.check(attention, firsts, one.bucket.num_tokens, **options)


@settings(max_examples=40, phases=(Stage.explicit, Stage.generate))
@given(data=st.data())
def test_outputs_follow_the_definition_whatever_the_tables(data):
    query_len = data.draw(st.integers(1, 4))
    sequences = data.draw(st.lists(st.tuples(st.integers(0, 21), st.integers(1, query_len)), min_size=1, max_size=4))
    contiguous, size = data.draw(st.booleans()), data.draw(st.sampled_from([1, 2, 4, 8]))
    num_shared = 0 if contiguous else data.draw(st.integers(0, min(context for context, _ in sequences) // size))
    scene = Scene(
        sequences,
        window=data.draw(st.sampled_from([0, 0, 1, 2, 5, 16])),
        size=size,
        num_blocks=4 * 25 + 3,
        num_shared=num_shared,
        seed=data.draw(st.integers(0, 1000)),
        cache_class=FlatKVCache,
    )
    used = [scene.tables[row, : -(-sum(part) // size)] for row, part in enumerate(sequences)]
    needed = int(np.concatenate(used).max()) + 1 if contiguous else sum(map(len, used))
    size = bucket(len(sequences) + data.draw(st.integers(0, 2)), query_len, needed + data.draw(st.integers(0, 120)))
    run(scene, scene.one(size), contiguous=contiguous, **data.draw(st.sampled_from(OPTIONS)))


def test_range_ends_with_the_padding_block_of_the_cache():
    scene = Scene([(5, 1)], num_blocks=6)
    tensors = decode_tensors(scene.one(bucket(2, 1, 100)), scene.tables, scene.cache, contiguous=True)
    assert tensors.lists[0].blocks.shape == (7,)
    run(scene, scene.one(bucket(2, 1, 100)), contiguous=True)


def test_layers_with_a_window_read_only_the_blocks_within_it():
    scene = Scene([(37, 1), (22, 1)], window=5)
    tensors = decode_tensors(scene.one(bucket(2, 1, 40)), scene.tables, scene.cache, contiguous=True)
    # Five tokens lie in two blocks of four, whatever the position.
    assert tensors.lists[0].blocks.tolist() == [*scene.tables[0, 8:10], *scene.tables[1, 4:6]]


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("window", [0, 6])
def test_shapes_follow_from_the_bucket(contiguous, window):
    size = bucket(4, 2, 40)
    scenes = [Scene(s, window=window) for s in ([], [(3, 2)], [(20, 1), (7, 2), (0, 2), (30, 1)])]
    found = [shapes(decode_tensors(s.one(size), s.tables, s.cache, contiguous=contiguous)) for s in scenes]
    assert found[0] == found[1] == found[2]


def test_pass_without_sequences_leaves_the_cache_as_it_was_but_for_padding():
    scene = Scene([(8, 1)])
    before = [part[:-1].clone() for part in scene.cache.layer(0)]
    empty = Scene([]).one(bucket(2, 1, 5))
    attention = GaudiDecode(
        scene.cache, decode_tensors(empty, scene.tables, scene.cache, contiguous=False), contiguous=False
    )
    output = attention.attend(
        scene.cache.flat_layer(0),
        torch.ones(2, 4, 8),
        torch.ones(2, 2, 8),
        torch.ones(2, 2, 6),
        options=AttentionOptions(),
    )
    assert output.isfinite().all()
    assert all(torch.equal(part[:-1], old) for part, old in zip(scene.cache.layer(0), before, strict=True))
    assert scene.cache.layer(0)[0][-1].any()


def test_bucket_that_is_too_small_is_refused():
    scene = Scene([(9, 1), (4, 1)])
    with pytest.raises(StepFailedError, match=r"has room for 4 blocks; its sequences need 5"):
        decode_tensors(scene.one(bucket(2, 1, 4)), scene.tables, scene.cache, contiguous=False)
    highest = int(max(scene.tables[0, :3].max(), scene.tables[1, :2].max()))
    with pytest.raises(StepFailedError, match=f"has room for {highest} blocks; its sequences need {highest + 1}"):
        decode_tensors(scene.one(bucket(2, 1, highest)), scene.tables, scene.cache, contiguous=True)


def test_shared_block_cannot_be_read_by_range():
    scene = Scene([(9, 1), (8, 1)], num_shared=2)
    with pytest.raises(StepFailedError, match="two sequences share a block"):
        decode_tensors(scene.one(bucket(2, 1, 40)), scene.tables, scene.cache, contiguous=True)
