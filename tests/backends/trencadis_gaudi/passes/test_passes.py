"""Every way to lay out a pass, over one layer and any block tables, against attention from its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st

from support.backends.paged_scene import KEY_DIM, OPTIONS, VALUE_DIM, Scene
from support.backends.passes import ints, make_pass
from trencadis.engine.batching.passes import unified_shape
from trencadis.errors import StepFailedError
from trencadis.records import Bucket, Phase, UnifiedBucket, UnifiedShape
from trencadis_gaudi.attention.fused_sdpa import emulated_fused_sdpa
from trencadis_gaudi.flat_cache import FlatKVCache
from trencadis_gaudi.passes.block_lists import (
    gathered_lists,
    owned_blocks,
    query_positions,
    ranged_lists,
    seen_slots,
    token_slots,
    window_entries,
)
from trencadis_gaudi.passes.decode import GaudiDecode, decode_tensors
from trencadis_gaudi.passes.flat_tokens import flat_tokens
from trencadis_gaudi.passes.merged import GaudiMergedPrefill, merged_tensors
from trencadis_gaudi.passes.prefill import GaudiPrefill, prefill_tensors
from trencadis_gaudi.passes.unified import GaudiUnified, cached_tokens, unified_batch, unified_tensors
from trencadis_torch.attention.options import AttentionOptions

KINDS = ("gathered", "by range", "prefill", "merged", "unified")


def decode(batch_size, query_len, num_blocks):
    return Bucket(batch_size, query_len, num_blocks, Phase.DECODE)


def tensors_of(kind, scene, bucket, cached=None):
    one = scene.one(bucket)
    given = one, scene.tables, scene.cache
    match kind:
        case "prefill":
            return prefill_tensors(*given)
        case "merged":
            return merged_tensors(*given)
        case "unified":
            batch = unified_batch(one, scene.tables, block_size=scene.cache.block_size, cached=cached)
            return unified_tensors(one, batch, scene.tables, scene.cache, bucket=bucket or Bucket.of(batch.shape))
    return decode_tensors(*given, contiguous=kind == "by range")


def attention_of(kind, cache, tensors, kernel=None):
    match kind:
        case "prefill":
            return GaudiPrefill(cache, tensors, kernel=kernel)
        case "merged":
            return GaudiMergedPrefill(cache, tensors, kernel=kernel)
        case "unified":
            return GaudiUnified(cache, tensors)
    return GaudiDecode(cache, tensors, contiguous=kind == "by range")


def check(kind, scene, bucket=None, *, kernel=None, cached=None, **options):
    tensors = tensors_of(kind, scene, bucket, cached)
    firsts = np.cumsum([0, *(length for _, length in scene.sequences)])
    size = len(tensors.slots) if kind == "unified" else bucket.num_tokens
    if kind not in ("merged", "unified"):
        firsts = np.arange(bucket.batch_size) * bucket.query_len
    return scene.check(attention_of(kind, scene.cache, tensors, kernel), firsts, size, **options)


@pytest.mark.representatives(len(KINDS))
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, phases=(Stage.explicit, Stage.generate))
@given(data=st.data())
def test_outputs_follow_the_definition_whatever_the_tables(kind, data):
    draw, more = data.draw, st.integers(0, 4)
    is_decode = kind in ("gathered", "by range")
    length = st.integers(1, draw(st.integers(1, 4)) if is_decode else 6)
    length = st.sampled_from([1, 1, 2, 6]) if kind == "unified" else length
    context = st.integers(0, 21 if is_decode else 14)
    sequences = draw(st.lists(st.tuples(context, length), min_size=1, max_size=4))
    contexts, lengths = zip(*sequences, strict=True)
    size = draw(st.sampled_from([1, 2, 4, 8]))
    scene = Scene(
        sequences,
        window=draw(st.sampled_from([0, 0, 1, 2, 4, 5, 11, 16])),
        size=size,
        num_blocks=110,
        num_shared=0 if kind == "by range" else draw(st.integers(0, min(contexts) // size)),
        value_dim=KEY_DIM if kind in ("prefill", "merged") else VALUE_DIM,
        seed=draw(st.integers(0, 1000)),
    )
    blocks = [-(-one // size) for one in contexts]
    cached = None
    match kind:
        case "prefill":
            bucket = Bucket(len(sequences) + draw(more), max(lengths) + draw(more), max(blocks) + draw(more))
        case "merged":
            bucket = Bucket(1, sum(lengths) + draw(more), sum(blocks))
        case "unified":  # one new token may be read back from the cache or attended to directly
            cached = ints(*(start + n * (n == 1 and draw(st.booleans())) for start, n in sequences))
            need = unified_batch(scene.one(None), scene.tables, block_size=size, cached=cached).shape
            spare = need.query_len + draw(more), need.num_blocks + draw(more), need.num_unique_blocks + draw(more) * 30
            bucket = UnifiedBucket(*spare, need.is_causal or draw(st.booleans()))
        case _:
            used = [scene.tables[row, : -(-sum(part) // size)] for row, part in enumerate(sequences)]
            needed = int(np.concatenate(used).max()) + 1 if kind == "by range" else sum(map(len, used))
            bucket = decode(len(sequences) + draw(more), max(lengths), needed + draw(st.integers(0, 120)))
    kernel = draw(st.sampled_from([None, emulated_fused_sdpa]))
    check(kind, scene, bucket, kernel=kernel, cached=cached, **draw(st.sampled_from(OPTIONS)))


def shapes(value):
    return tuple(value.shape) if isinstance(value, torch.Tensor) else [shapes(item) for item in value]


@pytest.mark.representatives(7)
@pytest.mark.parametrize(
    ("kind", "bucket", "window"),
    [
        *((kind, decode(4, 2, 40), window) for kind in ("gathered", "by range") for window in (0, 6)),
        ("prefill", Bucket(3, 8, 12), 0),
        ("merged", Bucket(1, 12, 9), 0),
        ("unified", UnifiedBucket(24, 6, 41, True), 0),
    ],
)
def test_shapes_follow_from_the_bucket(kind, bucket, window):
    most = [(20, 1), (7, 2 if bucket.phase is Phase.DECODE and kind != "unified" else 8), (0, 2)]
    whole, found = Scene(most), []
    for sequences in ([], [(3, 2)], most):
        scene = Scene(sequences, window=window)
        scene.tables = np.resize(scene.tables, whole.tables.shape)
        tensors = tensors_of(kind, scene, bucket)
        found.append(shapes((*tensors.causal, *tensors[1:]) if kind == "unified" else tensors))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("kind", "bucket"), [("by range", decode(2, 1, 100)), ("unified", UnifiedBucket(2, 0, 100, False))]
)
def test_range_ends_with_the_padding_block_of_the_cache(kind, bucket):
    scene = Scene([(5, 1)], num_blocks=6)
    tensors = tensors_of(kind, scene, bucket)
    assert len(tensors.unique_tokens if kind == "unified" else tensors.lists[0].blocks) == 7
    check(kind, scene, bucket)


def test_layers_with_a_window_read_only_the_blocks_within_it():
    scene = Scene([(37, 1), (22, 1)], window=5)
    # Five tokens lie in two blocks of four, whatever the position.
    expected = [*scene.tables[0, 8:10], *scene.tables[1, 4:6]]
    assert tensors_of("by range", scene, decode(2, 1, 40)).lists[0].blocks.tolist() == expected


@settings(max_examples=200, phases=(Stage.explicit, Stage.generate))
@given(size=st.integers(1, 6), window=st.integers(1, 20), query_len=st.integers(1, 5), start=st.integers(0, 40))
def test_window_list_holds_every_block_a_query_can_see_and_no_more(size, window, query_len, start):
    seen = {
        position // size
        for query in range(start, start + query_len)
        for position in range(max(0, query - window + 1), query + 1)
    }
    room = window_entries(10**6, batch_size=1, query_len=query_len, window=window, block_size=size)
    most = max((first + window + query_len - 2) // size - first // size + 1 for first in range(size))
    assert len(seen) <= room == most


@pytest.mark.parametrize(
    ("kind", "buckets"),
    [
        ("gathered", [decode(2, 1, 5)]),
        ("unified", [UnifiedBucket(3, *blocks) for blocks in ((2, 4, True), (0, 4, False), (0, 0, False))]),
    ],
)
def test_padding_alone_leaves_the_cache_as_it_was_and_stays_finite(kind, buckets):
    for bucket in buckets:
        scene = Scene([])
        before = [part[:-1].clone() for part in scene.cache.layer(0)]
        attention = attention_of(kind, scene.cache, tensors_of(kind, scene, bucket))
        count = bucket.num_tokens if kind == "gathered" else bucket.query_len
        new = torch.ones(count, 4, 8), torch.ones(count, 2, 8), torch.ones(count, 2, 6)
        options = AttentionOptions(sinks=torch.ones(4))
        output = attention.attend(scene.cache.flat_layer(0), *new, options=options)
        assert output.isfinite().all()
        assert kind == "gathered" or not output.any()
        assert all(torch.equal(part[:-1], old) for part, old in zip(scene.cache.layer(0), before, strict=True))
        assert scene.cache.layer(0)[0][-1].any()


def test_context_blocks_are_padded_with_the_padding_block_and_their_number_is_rounded_up_where_prompts_are_merged():
    scene = Scene([(5, 2), (0, 3)])
    tensors = tensors_of("prefill", scene, Bucket(3, 4, 3))
    assert tensors.blocks.tolist() == [[*scene.tables[0, :2], 40], [40, 40, 40], [40, 40, 40]]
    assert (tensors.context_lens.tolist(), tensors.query_lens.tolist()) == ([5, 0, 0], [2, 3, 0])
    for num_blocks, entries in ((0, 0), (1, 32), (32, 32), (33, 64)):
        assert tensors_of("merged", Scene([(0, 3)]), Bucket(1, 4, num_blocks)).blocks.shape == (1, entries)


def test_no_mask_is_built_where_causality_says_it_all():
    seen = []

    def kernel(*args):
        seen.append((args[3], args[9].tolist()))
        return emulated_fused_sdpa(*args)

    check("prefill", Scene([(0, 5), (0, 2)], value_dim=KEY_DIM), Bucket(3, 8, 0), kernel=kernel)
    assert seen == [(None, [5, 2, 1])]


def highest(scene):
    return int(max(scene.tables[row, : -(-sum(part) // 4)].max() for row, part in enumerate(scene.sequences)))


REFUSED = [
    ("gathered", Scene([(9, 1), (4, 1)]), lambda _: decode(2, 1, 4), "has room for 4 blocks; its sequences need 5"),
    ("by range", Scene([(9, 1), (4, 1)]), lambda scene: decode(2, 1, highest(scene)), "its sequences need "),
    ("by range", Scene([(9, 1), (8, 1)], num_shared=2), lambda _: decode(2, 1, 40), "two sequences share a block"),
    ("prefill", Scene([(9, 1)]), lambda _: Bucket(1, 1, 2), "room for 2 context blocks a sequence; one needs 3"),
    ("merged", Scene([(70, 1), (62, 1)]), lambda _: Bucket(1, 2, 32), "room for 32 context blocks .*; they need 34"),
    ("merged", Scene([(3, 2), (1, 3)]), lambda _: Bucket(1, 4, 8), "row of 4 tokens has no room for the 5 tokens"),
    ("unified", Scene([(5, 1), (9, 2)]), lambda _: UnifiedBucket(2, 9, 41, True), "its bucket is"),
]


@pytest.mark.representatives(len(REFUSED))
@pytest.mark.parametrize(
    ("kind", "scene", "bucket", "words"), REFUSED, ids=lambda value: value if value in KINDS else ""
)
def test_pass_that_does_not_fit_is_refused(kind, scene, bucket, words):
    with pytest.raises(StepFailedError, match=words):
        tensors_of(kind, scene, bucket(scene))


# ------------------------------------------------------------------------------------------- lists, written down by hand
PADDING = 1519


@pytest.mark.parametrize(
    ("make", "blocks", "groups", "usage"),
    [
        (gathered_lists, [5, 2, 3, *[PADDING] * 5], [0, 0, 1, *[-1] * 5], [128, 10, 128, *[1] * 5]),
        (
            ranged_lists,
            [PADDING, PADDING, 2, 3, PADDING, 5, PADDING, PADDING],
            [-1, -1, 0, 1, -1, 0, -1, -1],
            [1, 1, 10, 128, 1, 128, 1, 1],
        ),
    ],
)
def test_lists_of_the_worked_example(make, blocks, groups, usage):
    """Tables [[5, 2], [3]], last slots 265 and 511, 128 tokens a block, eight entries."""
    owned = owned_blocks(np.array([[5, 2], [3, 0]], np.int32), ints(0, 1), ints(0, 0), ints(2, 1))
    lists = make(owned, num_entries=8, padding_block=PADDING)
    assert (lists.blocks.tolist(), lists.groups.tolist()) == (blocks, groups)
    positions = query_positions(ints(128 + 265 % 128, 511 % 128), ints(1, 1), query_len=1)
    found, skipped = seen_slots(lists, positions, block_size=128)
    assert found[:, 0].tolist() == usage
    assert not skipped.any()


def test_padding_goes_round_the_padding_block():
    tables = np.array([[5, 2], [0, 0], [3, 1]], np.int32)
    sizes = {"batch_size": 3, "query_len": 3, "block_size": 4, "padding_block": 6}
    assert token_slots(tables, ints(2, 0), ints(3, 0), ints(2, 1), **sizes).tolist() == [
        [3 * 4 + 3, 1 * 4, 26],
        [20, 24, 25],
        [26, 27, 24],
    ]
    cache = FlatKVCache((), num_blocks=6, block_size=4, device=torch.device("cpu"))
    tokens = flat_tokens(make_pass(None, (2, 0), (3, 1), (2, 3)), tables, cache, num_tokens=8)
    assert tokens.groups.tolist() == [0, 0, 1, 1, 1, -1, -1, -1]
    assert tokens.positions.tolist() == [3, 4, 1, 2, 3, 0, 0, 0]
    assert tokens.slots.tolist() == [15, 4, 21, 22, 23, 25, 26, 27]
    assert tokens.firsts.tolist() == [0, 2]


def test_unified_blocks_of_the_worked_example():
    """Blocks of four tokens; two decodes that share block 7, and a prompt chunk of three tokens behind block 9."""
    one = make_pass(None, (0, 1, 2), (5, 6, 4), (1, 1, 3))
    cached = cached_tokens(one.starts, one.query_lens, ints(4, 5, 9))
    assert cached.tolist() == [6, 7, 4]
    batch = unified_batch(one, np.array([[7, 2], [7, 3], [9, 4]], np.int32), block_size=4, cached=cached)
    assert (batch.shared.tolist(), batch.shared_columns.tolist()) == ([7, 9], [[0, -1], [0, -1], [-1, 0]])
    assert (batch.unique.tolist(), batch.unique_groups.tolist()) == ([2, 3], [0, 1])
    assert batch.is_causal.tolist() == [False, False, True]
    assert batch.shape == UnifiedShape(5, 2, 4, True)
    # The last token of a prompt reads only what was computed before.
    assert cached_tokens(ints(4, 5), ints(1, 1), ints(5, 5)).tolist() == [4, 6]


@settings(max_examples=80, phases=(Stage.explicit, Stage.generate))
@given(st.data())
def test_backend_and_engine_agree_on_the_shape_of_a_unified_pass(data):
    sequences = data.draw(
        st.lists(st.tuples(st.integers(0, 12), st.sampled_from([1, 1, 2, 5])), min_size=1, max_size=5)
    )
    size = data.draw(st.sampled_from([1, 3, 4]))
    tables = np.array([data.draw(st.permutations(range(24)))[:18] for _ in sequences], np.int32)
    one = make_pass(None, range(len(sequences)), *zip(*sequences, strict=True))
    found = unified_batch(one, tables, block_size=size).shape
    assert unified_shape(one.starts, one.query_lens, tables, block_size=size) == found
