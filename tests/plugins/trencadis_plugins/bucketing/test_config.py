from __future__ import annotations

import attrs
import pytest

from trencadis.config import load_config
from trencadis_gaudi.config import GaudiConfig
from trencadis_plugins.bucketing.config import (
    ExponentialConfig,
    FromFileConfig,
    LinearConfig,
    PaddingAwareConfig,
    UnifiedConfig,
    vendor_names,
)
from trencadis_plugins.bucketing.prompt_rules import PromptRules

CONFIGS = (ExponentialConfig, LinearConfig, PaddingAwareConfig, UnifiedConfig, FromFileConfig, PromptRules)
FIELDS = [(config, field) for config in CONFIGS for field in attrs.fields(config) if field.type != "PromptRules"]
NUMBERS = [(config, field) for config, field in FIELDS if field.type == "int"]
FROM_ONE = {"slice_tokens", "slice_threshold"}
CHOICES = [(config, field) for config, field in FIELDS if field.type == "str" and field.name != "path"]
PERCENTAGES = [field.name for field in attrs.fields(PaddingAwareConfig) if field.name.endswith("_percent")]


def test_number_below_the_least_is_refused():
    for config, field in NUMBERS:
        least = 1 if field.name in FROM_ONE else min(field.default, 0)
        assert getattr(config(**{field.name: least}), field.name) == least
        with pytest.raises(ValueError, match=field.name):
            config(**{field.name: least - 1})


def test_unknown_choice_is_refused():
    for config, field in CHOICES:
        required = {"path": "buckets.txt"} if config is FromFileConfig else {}
        with pytest.raises(ValueError, match=field.name):
            config(**required, **{field.name: "other"})


def test_padding_is_at_most_half_of_a_size():
    for name in PERCENTAGES:
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


COMPONENTS = {
    "bucketing": {
        "exponential": ExponentialConfig,
        "from_file": FromFileConfig,
        "linear": LinearConfig,
        "padding_aware": PaddingAwareConfig,
    }
}


def aliases(config_class):
    return {field.name: field.metadata.get("aliases", ()) for field in attrs.fields(config_class)}


def components(**environ):
    return load_config(components=COMPONENTS, environ=environ).config.bucketing.components


def test_every_size_of_linear_has_the_vendors_name():
    named = {name for names in aliases(LinearConfig).values() for name in names}
    ranges = [("PROMPT", "BS"), ("PROMPT", "QUERY"), ("PROMPT", "SEQ"), ("PROMPT", "CTX"), ("DECODE", "BS")]
    expected = {
        f"VLLM_{phase}_{dimension}_BUCKET_{bound}"
        for phase, dimension in [*ranges, ("DECODE", "BLOCK")]
        for bound in ("MIN", "STEP", "MAX")
    }
    assert named == expected


def test_other_fields_stay_as_they_are():
    @attrs.frozen(field_transformer=vendor_names)
    class Config:
        prompt_bs_min: int = attrs.field(default=3, metadata={"unit": "sequences"})
        path: str = ""

    assert aliases(Config) == {"prompt_bs_min": ("VLLM_PROMPT_BS_BUCKET_MIN",), "path": ()}
    assert attrs.fields(Config).prompt_bs_min.metadata["unit"] == "sequences"
    assert Config().prompt_bs_min == 3


def test_one_variable_serves_every_strategy_with_that_size():
    found = components(VLLM_PROMPT_QUERY_BUCKET_STEP="256", VLLM_PROMPT_BS_BUCKET_MAX="4")
    assert found["linear"] == LinearConfig(prompt_query_step=256, prompt_bs_max=4)
    assert found["padding_aware"] == PaddingAwareConfig(prompt_query_step=256, prompt_bs_max=4)


@pytest.mark.parametrize(
    ("environ", "minimum"),
    [
        ({"VLLM_PROMPT_SEQ_BUCKET_MIN": "64"}, 64),
        ({"VLLM_PROMPT_SEQ_BUCKET_MIN": "64", "VLLM_PROMPT_QUERY_BUCKET_MIN": "32"}, 32),
    ],
)
def test_older_name_of_query_lengths_is_the_weaker_one(environ, minimum):
    assert components(**environ)["linear"].prompt_query_min == minimum


def test_older_name_serves_every_number_of_query_lengths_and_newer_ones_their_own():
    """Source: vllm-gaudi, tests/unit_tests/test_bucketing.py."""
    numbers = {"MIN": "64", "STEP": "128", "MAX": "1024", "PAD_MAX": "256", "PAD_PERCENT": "10"}
    older = {f"VLLM_PROMPT_SEQ_BUCKET_{name}": value for name, value in numbers.items()}
    found = components(**older, VLLM_DECODE_BLOCK_BUCKET_PAD_PERCENT="7", VLLM_DECODE_BLOCK_BUCKET_LIMIT="6")
    assert found["exponential"] == ExponentialConfig(decode_block_limit=6)
    assert found["padding_aware"] == PaddingAwareConfig(
        prompt_query_min=64,
        prompt_query_step=128,
        prompt_query_max=1024,
        prompt_query_pad_max=256,
        prompt_query_pad_percent=10,
        decode_block_pad_percent=7,
    )


def test_bucket_file_is_named_by_the_vendors_variable():
    given = {**COMPONENTS, "backend": {"gaudi": GaudiConfig}}
    resolved = load_config(components=given, environ={"VLLM_BUCKETING_FROM_FILE": "/tmp/b.txt"})
    assert resolved.config.bucketing.name == "from_file"
    assert resolved.config.bucketing.components["from_file"].path == "/tmp/b.txt"
    assert resolved.sources["bucketing.from_file.path"] == "environment VLLM_BUCKETING_FROM_FILE"
