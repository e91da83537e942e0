from __future__ import annotations

import attrs
import pytest

from trencadis_plugins.speculation.config import MixedConfig, NgramConfig, SuffixConfig
from trencadis_plugins.speculation.draft_config import TREES, DraftModelConfig, ParallelDraftConfig


def test_defaults_are_those_of_the_measurements():
    ngram, suffix, mixed = NgramConfig(), SuffixConfig(), MixedConfig()
    assert (ngram.min_match, ngram.max_match, ngram.max_draft_tokens, ngram.occurrence) == (2, 4, 4, "latest")
    assert (suffix.max_depth, suffix.factor, suffix.offset, suffix.min_prob) == (24, 1.0, 0.0, 0.1)
    assert (suffix.max_draft_tokens, suffix.max_cached_requests) == (8, 10_000)
    assert mixed.members == ("ngram", "suffix")


@pytest.mark.representatives(100)
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (NgramConfig, {"max_draft_tokens": 0}),
        (NgramConfig, {"min_match": 0}),
        (NgramConfig, {"occurrence": "first"}),
        (SuffixConfig, {"max_depth": 1}),
        (SuffixConfig, {"min_prob": 1.5}),
        (SuffixConfig, {"factor": -1.0}),
        (SuffixConfig, {"max_cached_tokens": -1}),
        (MixedConfig, {"members": ()}),
        (MixedConfig, {"explore_every": -1}),
        (MixedConfig, {"memory": 0}),
        (DraftModelConfig, {"max_draft_tokens": 0}),
        (DraftModelConfig, {"sampling": "sometimes"}),
        (DraftModelConfig, {"tokenizer": "mine"}),
        (DraftModelConfig, {"tree": "oak"}),
        (DraftModelConfig, {"tree_width": 0}),
        (DraftModelConfig, {"tree_depth": 0}),
        (DraftModelConfig, {"tree_shape": ()}),
        (DraftModelConfig, {"tree_shape": (2, 0)}),
        (ParallelDraftConfig, {"mask_token_id": -2}),
    ],
)
def test_values_out_of_range_are_refused(config, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        config(**options)


def test_inner_components_are_looked_up_as_such_and_the_draft_model_is_the_demo_unless_named():
    assert attrs.fields(MixedConfig).members.metadata["component"] == "speculation"
    for table in (DraftModelConfig, ParallelDraftConfig):
        assert table().model.startswith("demo-")
        assert attrs.fields(table).backend.metadata["component"] == "backend"
    assert [DraftModelConfig(tree=tree).tree for tree in TREES] == list(TREES)
