from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st

from support.backends.paged_scene import OPTIONS, Scene
from trencadis.errors import StepFailedError
from trencadis.records import Bucket, UnifiedBucket
from trencadis_gaudi.passes.unified import GaudiUnified, unified_batch, unified_tensors
from trencadis_torch.attention.options import AttentionOptions

NO_BUCKET = Bucket(1, 1, 0)


def tensors_of(scene, bucket=None, cached=None):
    one = scene.one(NO_BUCKET)
    batch = unified_batch(one, scene.tables, block_size=scene.cache.block_size, cached=cached)
    return unified_tensors(one, batch, scene.tables, scene.cache, bucket=bucket or Bucket.of(batch.shape))


def run(scene, bucket=None, cached=None, **options):
    tensors = tensors_of(scene, bucket, cached)
    lengths = np.array([length for _, length in scene.sequences])
    firsts = np.cumsum(lengths) - lengths
    return scene.check(GaudiUnified(scene.cache, tensors), firsts, len(tensors.slots), **options)


@settings(max_examples=60, phases=(Stage.explicit, Stage.generate))
@given(data=st.data())
def test_outputs_follow_the_definition_whatever_the_mixture(data):
    sequences = data.draw(
        st.lists(st.tuples(st.integers(0, 14), st.sampled_from([1, 1, 2, 6])), min_size=1, max_size=5)
    )
    size = data.draw(st.sampled_from([1, 2, 4, 8]))
    scene = Scene(
        sequences,
        window=data.draw(st.sampled_from([0, 0, 1, 4, 11])),
        size=size,
        num_blocks=110,
        num_shared=data.draw(st.integers(0, min(context for context, _ in sequences) // size)),
        seed=data.draw(st.integers(0, 1000)),
    )
    # One new token may be read back from the cache or attended to directly.
    cached = [start + length * (length == 1 and data.draw(st.booleans())) for start, length in sequences]
    cached = np.array(cached, np.int32)
    need = unified_batch(scene.one(NO_BUCKET), scene.tables, block_size=size, cached=cached).shape
    more = st.integers(0, 4)
    bucket = UnifiedBucket(
        need.query_len + data.draw(more),
        need.num_blocks + data.draw(more),
        need.num_unique_blocks + data.draw(st.integers(0, 120)),
        need.is_causal or data.draw(st.booleans()),
    )
    run(scene, bucket, cached, **data.draw(st.sampled_from(OPTIONS)))


@pytest.mark.parametrize("options", OPTIONS)
def test_each_kind_of_block_alone_is_enough(options):
    run(Scene([(0, 4), (0, 3)]), **options)  # causal
    run(Scene([(5, 1), (9, 1)]), **options)  # unique
    run(Scene([(7, 1), (7, 1)], num_shared=1), **options)  # shared and unique
    run(Scene([(3, 1)] * 2, num_shared=0), UnifiedBucket(4, 3, 41, True), **options)


def test_range_ends_with_the_padding_block_of_the_cache():
    scene = Scene([(5, 1)], num_blocks=6)
    bucket = UnifiedBucket(2, 0, 100, False)
    assert tensors_of(scene, bucket).unique_tokens.shape == (7,)
    run(scene, bucket)


def test_shapes_follow_from_the_bucket():
    bucket = UnifiedBucket(24, 6, 41, True)
    whole = Scene([(20, 1), (7, 8), (0, 2)])
    found = []
    for sequences in ([], [(3, 2)], [(20, 1), (7, 8), (0, 2)]):
        scene = Scene(sequences)
        scene.tables = np.resize(scene.tables, whole.tables.shape)
        tensors = tensors_of(scene, bucket)
        found.append([part.shape for part in (*tensors.causal, *tensors[1:])])
    assert found[0] == found[1] == found[2]


def test_padding_alone_stays_finite_whatever_the_bucket():
    scene = Scene([])
    for bucket in (UnifiedBucket(3, 2, 4, True), UnifiedBucket(3, 0, 4, False), UnifiedBucket(3, 0, 0, False)):
        attention = GaudiUnified(scene.cache, tensors_of(scene, bucket))
        output = attention.attend(
            scene.cache.flat_layer(0),
            torch.ones(3, 4, 8),
            torch.ones(3, 2, 8),
            torch.ones(3, 2, 6),
            options=AttentionOptions(sinks=torch.ones(4)),
        )
        assert output.shape == (3, 4, 6)
        assert not output.any()


def test_bucket_that_is_too_small_is_refused():
    with pytest.raises(StepFailedError, match="its bucket is"):
        tensors_of(Scene([(5, 1), (9, 2)]), UnifiedBucket(2, 9, 41, True))
