from __future__ import annotations

import argparse
from typing import Any

import attrs
import pytest

from trencadis.cli.sampling_flags import add_sampling_flags, sampling_params_of
from trencadis.errors import InvalidRequestError
from trencadis.records import SamplingParams, StructuredOutput

DEFAULTS = {"max_tokens": 64, "seed": 0}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(exit_on_error=False)
    add_sampling_flags(made, defaults=DEFAULTS)
    return made


def params_of(*arguments: str) -> SamplingParams:
    return sampling_params_of(parser().parse_args(arguments), defaults=DEFAULTS)


def test_without_flags_the_commands_defaults_and_then_the_fields_own_hold() -> None:
    assert params_of() == SamplingParams(max_tokens=64, seed=0)


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["--max-tokens", "5"], "max_tokens", 5),
        (["--max-tokens", "none"], "max_tokens", None),
        (["--temperature", "0.25"], "temperature", 0.25),
        (["--top-p=0.5"], "top_p", 0.5),
        (["--top-k", "-1"], "top_k", -1),
        (["--seed", "none"], "seed", None),
        (["--stop", "a", "--stop", "b c"], "stop", ("a", "b c")),
        (["--stop-token-ids", "3", "--stop-token-ids", "4"], "stop_token_ids", (3, 4)),
        (["--allowed-token-ids", "3"], "allowed_token_ids", (3,)),
        (["--logit-bias", "17=-5.5", "--logit-bias", "3=1"], "logit_bias", {17: -5.5, 3: 1.0}),
        (["--bad-words-ids", "1,2", "--bad-words-ids", "3"], "bad_words_ids", ((1, 2), (3,))),
        (
            ["--logits-processors", 'a={"b": 1}', "--logits-processors", "c"],
            "logits_processors",
            {"a": {"b": 1}, "c": {}},
        ),
        (["--mirostat-mode", "2"], "mirostat_mode", 2),
        (["--max-draft-tokens", "0"], "max_draft_tokens", 0),
        (["--ignore-eos"], "ignore_eos", True),
        (["--no-skip-special-tokens"], "skip_special_tokens", False),
        (["--logprobs", "3"], "logprobs", 3),
        (["--regex", "a+"], "structured", StructuredOutput.regex("a+")),
    ],
)
def test_each_type_of_field_is_read(arguments: list[str], field: str, value: Any) -> None:
    assert getattr(params_of(*arguments), field) == value


def test_every_field_has_a_flag_with_its_description_and_default() -> None:
    shown = " ".join(parser().format_help().split())
    for field in attrs.fields(SamplingParams):
        if field.name != "structured":  # has flags of its own
            assert f"--{field.name.replace('_', '-')}" in shown
    assert "Divides the logits; below 1e-5 means greedy. 0 to 100. (default: 1.0)" in shown
    assert "None means up to the model's length limit. (default: 64)" in shown
    assert "Leave special tokens out of the returned text. (default: true)" in shown
    assert "(default: none)" in shown


def test_a_value_out_of_range_names_the_parameter() -> None:
    with pytest.raises(InvalidRequestError, match=r"top_p = 1\.5"):
        params_of("--top-p", "1.5")


@pytest.mark.parametrize("arguments", [["--max-tokens", "many"], ["--logit-bias", "17"], ["--stop-token-ids", "x"]])
def test_a_value_of_the_wrong_type_is_an_argument_error(arguments: list[str]) -> None:
    with pytest.raises(argparse.ArgumentError, match="invalid"):
        params_of(*arguments)
