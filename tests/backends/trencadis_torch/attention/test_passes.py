"""Every way to attend on a CPU, over one layer and any block tables, against attention from its definition."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st

from support.backends.paged_scene import OPTIONS, Scene
from trencadis.errors import StepFailedError
from trencadis.records import Bucket, Phase
from trencadis_torch.attention import ragged, whole_texts
from trencadis_torch.attention.native import compiled_kernel
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.attention.padded import (
    PaddedDecode,
    PaddedKernelPass,
    PaddedPrefill,
    StaticFlatDecode,
    StaticKernelPass,
    flat_block_lists,
    static_decode,
)
from trencadis_torch.attention.ragged import RaggedPass, Workspace
from trencadis_torch.attention.whole_texts import WholeTexts
from trencadis_torch.cache.kv_cache import PagedKVCache
from trencadis_torch.native_build import find_compiler

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler on this machine")


def scene_of(kind, sequences, **options):
    kernel = compiled_kernel() if kind == "kernel" else None
    return Scene(sequences, make_cache=functools.partial(PagedKVCache, kernel=kernel), **options)


def pass_of(kind, scene, bucket=None):
    """Return a pass over all sequences, and the place of the first token of each in it."""
    contexts, lengths = zip(*scene.sequences, strict=True)
    arrays = [np.array(part, np.int32) for part in (range(len(lengths)), contexts, lengths)]
    named = dict(zip(("rows", "starts", "query_lens"), arrays, strict=True))
    tables = torch.from_numpy(scene.tables)
    new = [scene.slots(row, context + n)[context:] for row, (context, n) in enumerate(scene.sequences)]
    if kind == "whole texts":
        return WholeTexts(scene.cache.layers, list(lengths)), np.cumsum([0, *lengths])
    if kind == "ragged":
        one = RaggedPass(scene.cache, tables=tables, slots=torch.cat(new), **named, workspace=Workspace())
        return one, np.cumsum([0, *lengths])
    slots = torch.full((bucket.batch_size, bucket.query_len), scene.cache.padding_block * scene.cache.block_size)
    for row, part in enumerate(new):
        slots[row, : len(part)] = part
    facts = np.zeros((3, bucket.batch_size), np.int64)
    facts[:, : len(lengths)] = arrays
    options = {"tables": tables, "slots": slots.flatten(), "bucket": bucket}
    firsts = np.arange(bucket.batch_size) * bucket.query_len
    if kind == "kernel":
        return PaddedKernelPass(scene.cache, facts=facts, **options), firsts
    if kind == "decode":
        return PaddedDecode(scene.cache, **named, **options), firsts
    padded = dict(zip(named, torch.from_numpy(facts), strict=True))
    return PaddedPrefill(scene.cache, **padded, **options), firsts


def check(scene, one, firsts, bucket=None, **options):
    total = sum(length for _, length in scene.sequences) if bucket is None else bucket.num_tokens
    return scene.check(one, firsts, total, **options)


KINDS = ["whole texts", "ragged", "prefill", "decode", pytest.param("kernel", marks=needs_compiler)]


@pytest.mark.representatives(len(KINDS))
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, phases=(Stage.explicit, Stage.generate))
@given(data=st.data())
def test_outputs_follow_the_definition(kind, data):
    draw, more = data.draw, st.integers(0, 4)
    context = st.just(0) if kind == "whole texts" else st.integers(0, 50)
    length = st.sampled_from([1, 1, 2, 3, 4]) if kind == "decode" else st.sampled_from([1, 1, 2, 5, 5, 13, 19])
    sequences = draw(st.lists(st.tuples(context, length), min_size=1, max_size=5))
    size = draw(st.sampled_from([1, 4, 4, 16]))
    window = draw(st.sampled_from([0, 0, 1, 3, 5, 9, 64]))
    scene = scene_of(kind, sequences, window=window, size=size, num_blocks=360, seed=draw(st.integers(0, 1000)))
    bucket = None
    if kind in ("prefill", "decode", "kernel"):
        phase = Phase.DECODE if kind == "decode" else Phase.PREFILL
        blocks = [-(-sum(one) // size) for one in sequences]
        room = sum(blocks) if kind == "decode" else max(blocks)
        most = max(length for _, length in sequences)
        bucket = Bucket(len(sequences) + draw(more), most + draw(more), room + draw(more), phase)
    with pytest.MonkeyPatch.context() as patch:
        for module in (ragged, whole_texts):  # pieces meet without a seam
            patch.setattr(module, "MAX_PIECE", draw(st.sampled_from([3, 4, module.MAX_PIECE])))
        one, firsts = pass_of(kind, scene, bucket)
        found = check(scene, one, firsts, bucket, **draw(st.sampled_from(OPTIONS)))
    if kind == "kernel":
        found = found.unflatten(0, (bucket.batch_size, bucket.query_len))
        lengths = [length for _, length in sequences] + [0] * (bucket.batch_size - len(sequences))
        assert not any(found[row, length:].any() for row, length in enumerate(lengths))


@pytest.mark.representatives(5)
@pytest.mark.parametrize(
    ("sequences", "window", "limits", "groups"),
    [
        ([(6, 18), (0, 17)], 7, {"MAX_PIECE": 5}, [(2, 1), (3, 1), (5, 1), (5, 5)]),
        ([(15, 1)] * 7, 0, {"MAX_GATHERED": 48}, [(1, 1), (1, 3), (1, 3)]),
        ([(4, 1), (400, 1), (5, 1), (390, 1)], 0, {}, [(1, 2), (1, 2)]),
        ([(7, 1), (8, 1), (9, 1)], 0, {}, [(1, 3)]),
        ([(200, 1)], 9, {}, [(1, 1)]),
    ],
    ids=["long chunks", "many keys", "unlike contexts", "like decodes", "window"],
)
def test_ragged_passes_are_grouped_by_what_they_gather(monkeypatch, sequences, window, limits, groups):
    for name, value in limits.items():
        monkeypatch.setattr(ragged, name, value)
    scene = scene_of("ragged", sequences, window=window, num_blocks=600)
    one, firsts = pass_of("ragged", scene)
    check(scene, one, firsts)
    found = one._groups[window]
    assert sorted((group.query_len, group.num_pieces) for group in found) == groups
    if len(sequences) == 4:
        assert sorted(group.num_keys for group in found) == [6, 401]
    if len(sequences) == 3:  # queries need no gathering
        assert found[0].tokens == slice(0, 3)
    if window == 9:
        assert len(found[0].blocks) == 3


def test_workspace_is_used_again_and_grows():
    workspace, source = Workspace(), torch.arange(12.0).view(6, 2)
    first = workspace.gather("keys", source, torch.tensor([1, 3]))
    again = workspace.gather("keys", source, torch.tensor([5]))
    assert again.data_ptr() == first.data_ptr()
    assert again.tolist() == [[10.0, 11.0]]
    assert workspace.gather("keys", source, torch.arange(6)).tolist() == source.tolist()


def test_block_lists_of_the_worked_example():
    """Block tables [[5, 2], [3]] in a bucket of eight blocks."""
    owners, columns = flat_block_lists(np.array([2, 1], np.int32), num_entries=8)
    assert owners.tolist() == [0, 0, 1, -1, -1, -1, -1, -1]
    tables = [[5, 2], [3]]
    assert [tables[o][c] for o, c in zip(owners[:3], columns[:3], strict=True)] == [5, 2, 3]


@needs_compiler
def test_kernel_passes_take_their_shapes_from_all_but_the_blocks_and_refuse_more_tokens_than_the_bucket_has():
    scene = scene_of("kernel", [(4, 1)])
    two, nine, long = (
        pass_of("kernel", scene, Bucket(*sizes))[0].signature for sizes in ((2, 1, 2), (2, 1, 9), (1, 2, 2))
    )
    assert two == nine != long
    facts = np.array([[0], [4], [3]], np.int64)
    options = {"tables": torch.from_numpy(scene.tables), "slots": torch.zeros(2).long(), "bucket": Bucket(1, 2, 2)}
    with pytest.raises(StepFailedError, match="room for 2 tokens of a sequence; one brings 3"):
        PaddedKernelPass(scene.cache, facts=facts, **options)


@pytest.mark.representatives(4)
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize(
    ("sequences", "bucket"),
    [
        ([(4, 1), (9, 1), (0, 1)], Bucket(5, 1, 12, Phase.DECODE)),
        ([(11, 3), (3, 1)], Bucket(3, 4, 7, Phase.DECODE)),
        ([(17, 1)], Bucket(1, 1, 5, Phase.DECODE)),
    ],
)
def test_lists_made_on_the_device_are_those_of_the_host(sequences, bucket, window):
    scene = scene_of("decode", sequences, window=window)
    host, firsts = pass_of("decode", scene, bucket)
    facts = np.zeros((3, bucket.batch_size), np.int64)
    facts[:, : len(sequences)] = [range(len(sequences)), *zip(*sequences, strict=True)]
    slots, tables = host._slots, torch.from_numpy(scene.tables)
    device = static_decode(torch.from_numpy(facts), bucket, slots=slots, tables=tables, cache=scene.cache)
    assert isinstance(device, StaticFlatDecode)
    state = scene._generator.get_state()
    expected = check(scene, host, firsts, bucket)
    scene._generator.set_state(state)
    found = check(scene, device, firsts, bucket)
    for first, (_, length) in zip(firsts, sequences, strict=False):
        assert torch.equal(found[first : first + length], expected[first : first + length])


def test_padding_of_a_static_kernel_pass_yields_nothing():
    class Half:
        """Writes what it is given for the first token alone."""

        def attend(self, layer_index, query, keys, values, *, output, options):
            output[0] = layer_index

    new = torch.ones(2, 3, 4), torch.ones(2, 1, 4), torch.ones(2, 1, 5)
    found = StaticKernelPass(Half()).attend(7, *new, options=AttentionOptions())
    assert found.shape == (2, 3, 5)
    assert found[0].eq(7).all()
    assert found[1].eq(0).all()
