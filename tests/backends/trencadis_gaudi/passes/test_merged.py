from __future__ import annotations

import numpy as np
import pytest
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st

from support.backends.paged_scene import KEY_DIM, OPTIONS, Scene
from trencadis.errors import StepFailedError
from trencadis.records import Bucket
from trencadis_gaudi.attention.fused_sdpa import emulated_fused_sdpa
from trencadis_gaudi.passes.merged import GaudiMergedPrefill, merged_tensors


def run(scene, bucket, kernel=None, **options):
    tensors = merged_tensors(scene.one(bucket), scene.tables, scene.cache)
    attention = GaudiMergedPrefill(scene.cache, tensors, kernel=kernel)
    lengths = np.array([length for _, length in scene.sequences])
    return scene.check(attention, np.cumsum(lengths) - lengths, bucket.query_len, **options)


@settings(max_examples=40, phases=(Stage.explicit, Stage.generate))
@given(data=st.data())
def test_outputs_follow_the_definition_whatever_the_tables(data):
    sequences = data.draw(st.lists(st.tuples(st.integers(0, 14), st.integers(1, 6)), min_size=1, max_size=4))
    size = data.draw(st.sampled_from([1, 2, 4, 8]))
    scene = Scene(
        sequences,
        window=data.draw(st.sampled_from([0, 0, 1, 4, 11])),
        size=size,
        num_blocks=90,
        num_shared=data.draw(st.integers(0, min(context for context, _ in sequences) // size)),
        value_dim=KEY_DIM,
        seed=data.draw(st.integers(0, 1000)),
    )
    total = sum(length for _, length in sequences) + data.draw(st.integers(0, 5))
    needed = sum(-(-context // size) for context, _ in sequences)
    kernel = data.draw(st.sampled_from([None, emulated_fused_sdpa]))
    run(scene, Bucket(1, total, needed), kernel, **data.draw(st.sampled_from(OPTIONS)))


@pytest.mark.parametrize(("num_blocks", "entries"), [(0, 0), (1, 32), (32, 32), (33, 64)])
def test_context_is_rounded_up(num_blocks, entries):
    scene = Scene([(0, 3)])
    tensors = merged_tensors(scene.one(Bucket(1, 4, num_blocks)), scene.tables, scene.cache)
    assert tensors.blocks.shape == (1, entries)
    run(scene, Bucket(1, 4, num_blocks))


def test_shapes_follow_from_the_bucket():
    bucket = Bucket(1, 12, 9)
    scenes = [Scene(s) for s in ([], [(3, 2)], [(20, 1), (7, 8), (0, 2)])]
    found = [[t.shape for t in merged_tensors(s.one(bucket), s.tables, s.cache)] for s in scenes]
    assert found[0] == found[1] == found[2]


def test_bucket_that_is_too_small_is_refused():
    scene = Scene([(70, 1), (62, 1)])
    with pytest.raises(StepFailedError, match="room for 32 context blocks of all its sequences; they need 34"):
        merged_tensors(scene.one(Bucket(1, 2, 32)), scene.tables, scene.cache)
