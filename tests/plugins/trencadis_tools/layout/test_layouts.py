"""Arithmetic of layouts, by hand for models that everybody knows."""

from __future__ import annotations

import attrs
import pytest

from trencadis_tools.layout.layouts import (
    LayoutNeeds,
    Limits,
    Traffic,
    all_layouts,
    expert_obstacle,
    local_bytes,
    pipeline_obstacle,
    propose,
    stages,
    tensor_obstacle,
    traffic,
)
from trencadis_tools.layout.model import Division, Weight, read_model

GIB = 2**30
LIMITS = Limits(
    num_devices=8,
    memory_bytes=96 * GIB,
    memory_fraction=0.5,
    max_bytes=0,
    block_size=16,
    max_model_len=8192,
    max_num_seqs=256,
    max_num_batched_tokens=2048,
)


@pytest.fixture
def layouts(described):
    """``layouts("llama", tensor=2)`` is what one layout needs."""

    def of(kind, limits=LIMITS, tensor=1, pipeline=1, expert=1, **changes):
        found, _ = all_layouts(read_model(described(kind, **changes)), limits)
        sizes = (tensor, pipeline, expert)
        return next(one for one in found if (one.tensor, one.pipeline, one.expert) == sizes)

    return of


# ------------------------------------------------------------------------------------------------ Llama-3-8B

ATTENTION = 2 * 4096 * 4096 + 2 * 1024 * 4096
MLP = 3 * 14336 * 4096
NORMS = 2 * 4096


def test_one_rank_has_all_of_llama(layouts):
    one = layouts("llama")
    assert one.weights_bytes == 2 * 8_030_261_248
    assert one.weights_bytes == 2 * (32 * (ATTENTION + MLP + NORMS) + 2 * 128256 * 4096 + 4096)
    assert one.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2 == 128 * 1024
    assert (one.kv_heads, one.kv_repeats, one.data) == (8, 1, 8)
    assert one.decode == one.prefill == Traffic(num_bytes=0, num_messages=0)
    blocks = (96 * GIB - one.weights_bytes) // 2 // (16 * 128 * 1024)
    assert (one.num_tokens, one.num_sequences) == (blocks * 16, blocks // 512)


def test_a_vocabulary_that_does_not_go_over_the_ranks_is_padded(layouts):
    one = layouts("llama", tensor=4, vocab_size=128258)
    assert one.weights_bytes == 2 * (32 * ((ATTENTION + MLP) // 4 + NORMS) + 2 * 32065 * 4096 + 4096)


def test_stages_send_hidden_states_and_have_the_heaviest_stages_weights(layouts):
    one = layouts("llama", pipeline=2)
    assert one.weights_bytes == 2 * (16 * (ATTENTION + MLP + NORMS) + 128256 * 4096 + 4096)
    assert one.kv_bytes_per_token == 64 * 1024
    assert one.decode == Traffic(num_bytes=256 * 4096 * 2, num_messages=1)
    assert one.prefill == Traffic(num_bytes=2048 * 4096 * 2, num_messages=1)


def test_the_stage_with_the_least_room_says_how_many_tokens_there_are(layouts):
    one = layouts("llama", pipeline=3)  # of 10, 12 and 10 layers
    layer = ATTENTION + MLP + NORMS
    assert one.weights_bytes == 2 * (10 * layer + 128256 * 4096 + 4096)
    assert one.num_tokens == (96 * GIB - 2 * 12 * layer) // 2 // (16 * 12 * 4096) * 16


def test_tied_embeddings_are_on_the_first_and_the_last_stage(layouts):
    one, tied = layouts("llama", tie_word_embeddings=True), layouts("llama", pipeline=2, tie_word_embeddings=True)
    layers = 32 * (ATTENTION + MLP + NORMS)
    assert one.weights_bytes == 2 * (layers + 128256 * 4096 + 4096)
    assert tied.weights_bytes == 2 * (layers // 2 + 128256 * 4096 + 4096)


def test_both_ways_at_once_count_for_each_stage(layouts, described):
    one = layouts("llama", tensor=2, pipeline=2)
    first = (2 * 16 + 1) * 256 * 4096 * 2 + 256 * 4096 * 2
    last = 2 * 16 * 256 * 4096 * 2 + 256 * 128256 * 2
    assert last > first
    assert one.decode == Traffic(num_bytes=last, num_messages=2 * 16 + 1)
    plan = read_model(described("llama"))
    prefill = traffic(plan, tensor=2, pipeline=2, num_tokens=2048, num_logits=1)
    assert prefill == Traffic(num_bytes=34 * 2048 * 4096 * 2, num_messages=34)


def test_the_cache_is_capped_as_configured(layouts):
    one = layouts("llama", attrs.evolve(LIMITS, max_bytes=5 * 16 * 128 * 1024 + 1))
    assert (one.num_tokens, one.num_sequences) == (80, 0)
    enough = 512 * 16 * 128 * 1024  # of which one block less holds no sequence
    found = [layouts("llama", attrs.evolve(LIMITS, max_bytes=size)).num_sequences for size in (enough, enough - 1)]
    assert found == [1, 0]
    assert one.misfit == "no sequence of 8192 tokens fits"
    assert layouts("llama", attrs.evolve(LIMITS, memory_bytes=15 * 10**9)).misfit == "weights do not fit"


# --------------------------------------------------------------------------------------------------- experts


def test_qwen3_moe_has_norms_of_heads_and_narrow_experts(layouts):
    layer = 2 * 4096 * 2048 + 2 * 512 * 2048 + 128 * 3 * 768 * 2048
    whole = 2 * 128 + 128 * 2048 + 2 * 2048
    rest = 2 * 151936 * 2048
    assert layouts("qwen3_moe").weights_bytes == 2 * (48 * (layer + whole) + rest + 2048) == 2 * 30_532_122_624
    assert layouts("qwen3_moe", tensor=4).weights_bytes == 2 * (48 * (layer // 4 + whole) + rest // 4 + 2048)
    eight = 2 * 4096 * 2048 // 8 + 2 * 128 * 2048 + 128 * 3 * 768 * 2048 // 8
    one = layouts("qwen3_moe", tensor=8, expert=8)
    assert one.weights_bytes == 2 * (48 * (eight + whole) + rest // 8 + 2048)
    assert one.kv_bytes_per_token == 2 * 48 * 1 * 128 * 2
    assert (one.kv_heads, one.kv_repeats) == (1, 2)


def test_keys_and_values_of_latent_attention_are_kept_for_every_head_on_every_rank(layouts):
    one, four = layouts("latent"), layouts("latent", tensor=4)
    assert one.kv_bytes_per_token == four.kv_bytes_per_token == 3 * 4 * (8 + 4 + 20) * 2
    assert (four.kv_heads, four.kv_repeats) == (4, 4)


# -------------------------------------------------------------------------------------------------- legality


def test_sizes_that_heads_do_not_go_over_are_refused_with_those_they_do(described):
    plan = read_model(described("llama"))
    legal = [n for n in range(1, 65) if not tensor_obstacle(plan, n)]
    assert legal == [1, 2, 4, 8, 16, 32]
    assert tensor_obstacle(plan, 3) == "32 query heads and 8 KV heads go over 1, 2, 4, 8, 16, 32 ranks"


def test_kv_heads_must_go_over_the_ranks_or_the_ranks_over_them(described):
    plan = read_model(described("llama", hidden_size=3072, num_attention_heads=24, num_key_value_heads=4))
    assert [n for n in range(1, 25) if not tensor_obstacle(plan, n)] == [1, 2, 4, 8]
    assert "go over 1, 2, 4, 8, 12, 24 ranks" in tensor_obstacle(plan, 3)  # 14336 does not go over 12


def test_a_width_that_does_not_go_over_the_ranks_is_named(described):
    plan = read_model(described("llama", intermediate_size=14338))
    assert (
        tensor_obstacle(plan, 4)
        == "14338 outputs or inputs of model.layers.0.mlp.gate_proj.weight go over 1, 2, 67, 107, 134, 214, 7169, 14338 ranks"
    )


def test_stages_are_as_many_as_layers_at_most(described):
    plan = read_model(described("llama", num_hidden_layers=5))
    assert [n for n in range(1, 9) if not pipeline_obstacle(plan, n)] == [1, 2, 3, 4, 5]
    assert pipeline_obstacle(plan, 6) == "5 layers make 1 to 5 stages"


def test_whole_experts_go_over_divisors_of_their_number(described):
    plan = read_model(described("mixtral", num_local_experts=6))
    assert [n for n in range(1, 9) if not expert_obstacle(plan, n)] == [1, 2, 3, 6]
    assert expert_obstacle(plan, 4) == "6 experts go over 1, 2, 3, 6 ranks"
    assert "no experts" in expert_obstacle(read_model(described("llama")), 2)


def test_whole_experts_leave_their_width_free(described):
    plan = read_model(described("mixtral", intermediate_size=14338))
    assert "experts" in tensor_obstacle(plan, 4)
    assert not tensor_obstacle(plan, 4, expert=4)
    found, refused = all_layouts(plan, LIMITS)
    assert {(one.tensor, one.expert) for one in found if one.pipeline == 1} == {(1, 1), (2, 1), (2, 2), (4, 4), (8, 8)}
    assert set(refused["tensor"]) == {3, 4, 5, 6, 7, 8}


def test_every_legal_layout_of_some_devices_is_listed_with_as_many_copies_as_there_is_room_for(described):
    found, refused = all_layouts(read_model(described("llama")), attrs.evolve(LIMITS, num_devices=6))
    assert [(one.tensor, one.pipeline, one.data) for one in found] == [
        *((1, pipeline, 6 // pipeline) for pipeline in range(1, 7)),
        (2, 1, 3),
        (2, 2, 1),
        (2, 3, 1),
        (4, 1, 1),
    ]
    assert (set(refused["tensor"]), set(refused["pipeline"])) == ({3, 5, 6}, set())


@pytest.mark.parametrize("is_tied", [False, True])
def test_stages_are_shared_out_by_bytes_and_the_vocabulary_counts_on_both_ends(described, is_tied):
    plan = read_model(described("llama", num_hidden_layers=8, tie_word_embeddings=is_tied))
    assert 2 * (ATTENTION + MLP + NORMS) < 128256 * 4096
    assert [len(part) for part in stages(plan, tensor=1, pipeline=3)] == [2, 4, 2]
    assert stages(plan, tensor=1, pipeline=1) == [range(8)]


def test_a_fused_projection_whose_heads_do_not_go_over_the_ranks_is_padded():
    fused = Weight(name="qkv", layer=0, num_bytes=600, division=Division.EVEN, size=6, heads=(6, 3))
    assert local_bytes(fused, 3) == 200
    assert local_bytes(fused, 4) == 150


# -------------------------------------------------------------------------------------------------- proposals


def needs(tensor=1, pipeline=1, *, expert=1, data=1, tokens=1000, sent=0, **reasons):
    return LayoutNeeds(
        tensor=tensor,
        pipeline=pipeline,
        expert=expert,
        data=data,
        weights_bytes=1,
        kv_bytes_per_token=1,
        kv_heads=1,
        kv_repeats=1,
        num_tokens=tokens,
        num_sequences=1,
        decode=Traffic(num_bytes=sent, num_messages=1),
        prefill=Traffic(),
        **reasons,
    )


@pytest.mark.representatives(1000)
@pytest.mark.parametrize(
    ("layouts", "index"),
    [
        ([needs(8, tokens=8000), needs(1, data=8, tokens=600)], 1),
        ([needs(8, tokens=8000), needs(1, data=8, tokens=400)], 0),
        ([needs(8, tokens=8000), needs(1, data=8, tokens=500)], 1),
        ([needs(8, tokens=8000, sent=1), needs(1, data=8, misfit="no")], 0),
        ([needs(8, tokens=8000, sent=1), needs(1, data=8, unserved="no")], 0),
        ([needs(1, 2, tokens=1200), needs(2, 1, tokens=1000, sent=99)], 1),
        ([needs(2, sent=50), needs(2, expert=2, sent=40)], 1),
        ([needs(2, sent=50, tokens=1500), needs(2, expert=2, sent=40, tokens=1000)], 0),
        ([needs(4, unserved="no", tokens=99999), needs(1, data=4)], 1),
    ],
)
def test_the_smallest_copy_with_half_of_the_room_is_proposed_then_fewest_stages_then_fewest_bytes(layouts, index):
    assert propose(layouts) is layouts[index]


def test_what_is_not_served_is_listed_and_not_proposed(described):
    plan = read_model(described("llama"))
    small = attrs.evolve(LIMITS, memory_bytes=14 * GIB)
    served, _ = all_layouts(plan, small, lambda name, size: "no stages" if name == "pipeline" and size > 1 else "")
    assert {one.unserved for one in served if one.pipeline > 1} == {"no stages"}
    chosen = propose(served)
    assert (chosen.tensor, chosen.pipeline, chosen.data) == (2, 1, 4)
    assert propose([needs(misfit="no"), needs(2, unserved="no")]) is None
