from __future__ import annotations

from types import SimpleNamespace

import pytest

from trencadis.errors import ModelLoadError
from trencadis_torch.parallel.heads import Heads, LocalConfig, set_local_heads


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size"), [(8, 8, 4), (8, 4, 2), (8, 2, 4), (8, 2, 8), (4, 1, 4), (6, 2, 2)]
)
def test_every_query_head_finds_its_kv_head_on_its_rank(num_heads, num_kv_heads, size):
    groups = num_heads // num_kv_heads
    seen = []
    for rank in range(size):
        heads = Heads.of(num_heads, num_kv_heads, rank=rank, size=size, what="m")
        local_groups = heads.num_query // heads.num_kv
        for own in range(heads.num_query):
            assert heads.first_kv + own // local_groups == (heads.first_query + own) // groups
            seen.append(heads.first_query + own)
    assert seen == list(range(num_heads))


def test_ranks_beyond_the_kv_heads_have_them_several_times():
    found = [Heads.of(8, 2, rank=rank, size=4, what="m") for rank in range(4)]
    assert [(one.first_kv, one.num_kv) for one in found] == [(0, 1), (0, 1), (1, 1), (1, 1)]


@pytest.mark.parametrize(("size", "legal"), [(3, "1, 2, 4, 12"), (24, "1, 2, 4, 12")])
def test_other_numbers_of_ranks_are_refused_with_the_legal_ones(size, legal):
    with pytest.raises(ModelLoadError, match="12 query heads and 4 KV heads") as found:
        Heads.of(12, 4, rank=0, size=size, what="m")
    assert found.value.hint.endswith(f"one of: {legal}.")


def test_a_local_configuration_follows_the_whole_one_in_all_else():
    whole = SimpleNamespace(num_attention_heads=8, hidden_size=64, _attn_implementation="eager")
    local = LocalConfig(whole, num_attention_heads=2)
    whole._attn_implementation = "paged"
    assert (local.num_attention_heads, local.hidden_size, local._attn_implementation) == (2, 64, "paged")
    with pytest.raises(AttributeError):
        _ = local.nothing


def test_attributes_that_mean_heads_are_set_and_others_left():
    config = SimpleNamespace(num_attention_heads=8, num_key_value_heads=4, hidden_size=64)
    module = SimpleNamespace(
        num_heads=8, num_key_value_heads=4, num_key_value_groups=2, head_dim=8, split_size=64, config=config
    )
    heads = Heads.of(8, 4, rank=1, size=8, what="m")
    set_local_heads(module, heads, num_heads=8, num_kv_heads=4)
    assert (module.num_heads, module.num_key_value_heads, module.num_key_value_groups) == (1, 1, 1)
    assert (module.head_dim, module.split_size) == (8, 8)
    assert (module.config.num_attention_heads, module.config.num_key_value_heads, module.config.hidden_size) == (
        1,
        1,
        64,
    )
    assert config.num_attention_heads == 8
