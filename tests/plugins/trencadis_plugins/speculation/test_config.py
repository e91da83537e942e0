from __future__ import annotations

import attrs
import pytest

from trencadis_plugins.speculation.config import MixedConfig, NgramConfig, SuffixConfig


def test_defaults_are_those_of_the_measurements():
    ngram, suffix, mixed = NgramConfig(), SuffixConfig(), MixedConfig()
    assert (ngram.min_match, ngram.max_match, ngram.max_draft_tokens, ngram.occurrence) == (2, 4, 4, "latest")
    assert (suffix.max_depth, suffix.factor, suffix.offset, suffix.min_prob) == (24, 1.0, 0.0, 0.1)
    assert (suffix.max_draft_tokens, suffix.max_cached_requests) == (8, 10_000)
    assert mixed.members == ("ngram", "suffix")


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
    ],
)
def test_values_out_of_range_are_refused(config, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        config(**options)


def test_members_of_a_mixture_are_looked_up_as_components():
    assert attrs.fields(MixedConfig).members.metadata["component"] == "speculation"
