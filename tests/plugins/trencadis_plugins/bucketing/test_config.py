from __future__ import annotations

import attrs
import pytest

from trencadis_plugins.bucketing.config import (
    ExponentialConfig,
    FromFileConfig,
    LinearConfig,
    PaddingAwareConfig,
    UnifiedConfig,
)
from trencadis_plugins.bucketing.prompt_rules import PromptRules

CONFIGS = (ExponentialConfig, LinearConfig, PaddingAwareConfig, UnifiedConfig, FromFileConfig, PromptRules)
FIELDS = [(config, field) for config in CONFIGS for field in attrs.fields(config) if field.type != "PromptRules"]
NUMBERS = [(config, field) for config, field in FIELDS if field.type == "int"]
FROM_ONE = {"slice_tokens", "slice_threshold"}
CHOICES = [(config, field) for config, field in FIELDS if field.type == "str" and field.name != "path"]
PERCENTAGES = [field.name for field in attrs.fields(PaddingAwareConfig) if field.name.endswith("_percent")]


def names(fields):
    return [f"{config.__name__}.{field.name}" for config, field in fields]


@pytest.mark.parametrize(("config", "field"), FIELDS, ids=names(FIELDS))
def test_every_setting_is_explained_and_has_a_unit_if_it_is_a_number(config, field):
    assert field.metadata["help"].endswith(".")
    units = {"sizes", "sequences", "tokens", "blocks", "percent"} if field.type == "int" else {""}
    assert field.metadata["unit"] in units


@pytest.mark.parametrize(("config", "field"), NUMBERS, ids=names(NUMBERS))
def test_number_below_the_least_is_refused(config, field):
    least = 1 if field.name in FROM_ONE else min(field.default, 0)
    assert getattr(config(**{field.name: least}), field.name) == least
    with pytest.raises(ValueError, match=field.name):
        config(**{field.name: least - 1})


@pytest.mark.parametrize(("config", "field"), CHOICES, ids=names(CHOICES))
def test_unknown_choice_is_refused(config, field):
    required = {"path": "buckets.txt"} if config is FromFileConfig else {}
    with pytest.raises(ValueError, match=field.name):
        config(**required, **{field.name: "other"})


@pytest.mark.parametrize("name", PERCENTAGES)
def test_padding_is_at_most_half_of_a_size(name):
    assert getattr(PaddingAwareConfig(), name) == 25
    assert getattr(PaddingAwareConfig(**{name: 50}), name) == 50
    with pytest.raises(ValueError, match=name):
        PaddingAwareConfig(**{name: 51})


@pytest.mark.parametrize(
    "setting",
    [
        {"prompt_ctx_limit": 3},
        {"clamp_decode_blocks": False},
        {"prompt_ctx_max": 0},
        {"single_token_prompts": True},
        {"prompts": PromptRules(query_chunk=256)},
    ],
)
def test_older_generation_refuses_what_it_does_not_know(setting):
    ExponentialConfig(**setting)
    with pytest.raises(ValueError, match=f"{next(iter(setting))} has no meaning with generation"):
        ExponentialConfig(generation="2025-07", **setting)


def test_file_must_be_named():
    with pytest.raises(ValueError, match="must name a file"):
        FromFileConfig(path="")
