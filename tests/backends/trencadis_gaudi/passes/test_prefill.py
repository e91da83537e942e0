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
from trencadis_gaudi.passes.prefill import GaudiPrefill, prefill_tensors


def run(scene, bucket, kernel=None, **options):
    tensors = prefill_tensors(scene.one(bucket), scene.tables, scene.cache)
    attention = GaudiPrefill(scene.cache, tensors, kernel=kernel)
    return scene.check(attention, np.arange(bucket.batch_size) * bucket.query_len, bucket.num_tokens, **options)


@settings(max_examples=30, phases=(Stage.explicit, Stage.generate))
@given(data=st.data())
def test_outputs_follow_the_definition_whatever_the_tables(data):
    sequences = data.draw(st.lists(st.tuples(st.integers(0, 14), st.integers(1, 6)), min_size=1, max_size=3))
    size = data.draw(st.sampled_from([1, 2, 4, 8]))
    scene = Scene(
        sequences,
        window=data.draw(st.sampled_from([0, 0, 1, 4, 11])),
        size=size,
        num_blocks=64,
        num_shared=data.draw(st.integers(0, min(context for context, _ in sequences) // size)),
        value_dim=KEY_DIM,
        seed=data.draw(st.integers(0, 1000)),
    )
    bucket = Bucket(
        len(sequences) + data.draw(st.integers(0, 2)),
        max(length for _, length in sequences) + data.draw(st.integers(0, 4)),
        max(-(-context // size) for context, _ in sequences) + data.draw(st.integers(0, 5)),
    )
    kernel = data.draw(st.sampled_from([None, emulated_fused_sdpa]))
    run(scene, bucket, kernel, **data.draw(st.sampled_from(OPTIONS)))


def test_no_mask_is_built_where_causality_says_it_all():
    seen = []

    def kernel(*args):
        seen.append((args[3], args[9].tolist()))
        return emulated_fused_sdpa(*args)

    run(Scene([(0, 5), (0, 2)], value_dim=KEY_DIM), Bucket(3, 8, 0), kernel)
    assert seen == [(None, [5, 2, 1])]


def test_padding_of_the_context_is_the_padding_block():
    scene = Scene([(5, 2), (0, 3)])
    tensors = prefill_tensors(scene.one(Bucket(3, 4, 3)), scene.tables, scene.cache)
    first, second = scene.tables[0, :2].tolist()
    assert tensors.blocks.tolist() == [[first, second, 40], [40, 40, 40], [40, 40, 40]]
    assert tensors.context_lens.tolist() == [5, 0, 0]
    assert tensors.query_lens.tolist() == [2, 3, 0]


def test_shapes_follow_from_the_bucket():
    bucket = Bucket(3, 8, 12)
    scenes = [Scene(s) for s in ([], [(3, 2)], [(20, 1), (7, 8), (0, 2)])]
    found = [[t.shape for t in prefill_tensors(s.one(bucket), s.tables, s.cache)] for s in scenes]
    assert found[0] == found[1] == found[2] == [(3, 8), (3, 12), (3,), (3,)]


def test_bucket_that_is_too_small_is_refused():
    scene = Scene([(9, 1)])
    with pytest.raises(StepFailedError, match="room for 2 context blocks a sequence; one needs 3"):
        prefill_tensors(scene.one(Bucket(1, 1, 2)), scene.tables, scene.cache)
