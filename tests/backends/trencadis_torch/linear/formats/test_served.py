"""Quantised checkpoints as the backend serves them, against transformers with the weights that they stand for."""

from __future__ import annotations

import functools

import pytest

from support.backends import quantised_checkpoints as made
from support.backends import tiny_models
from support.backends.served import held, prompt_logprobs
from trencadis.errors import ModelLoadError

PROMPT = tiny_models.prompt(20)

ROUNDS = frozenset(made.FORMATS.keys() - {"fp8", "compressed_fp8"})
"""Formats whose weights are held as integers: the rows that meet them are rounded to 8 bits."""


@functools.cache
def checkpoint(kind, architecture, folder):
    """Return paths of a quantised checkpoint and of the same weights as floats."""
    form = made.FORMATS[kind]
    plain = tiny_models.save_model(architecture, folder / kind)
    made.quantise_checkpoint(plain, form, folder / kind / "quantised", folder / kind / "floats")
    return folder / kind / "quantised", folder / kind / "floats"


def assert_near(found, expected):
    assert (found - expected).abs().mean() < 0.1 * (expected - expected.roll(1)).abs().mean()


@pytest.mark.parametrize("kind", sorted(made.FORMATS.keys() - ROUNDS))
def test_weights_held_as_floats_give_the_tokens_of_transformers(tmp_path, kind, caplog):
    quantised, floats = checkpoint(kind, "qwen3", tmp_path)
    found, text = held(quantised, caplog)
    assert found == tiny_models.greedy_reference(floats, PROMPT, 8)
    assert "held as float8_e4m3fn" in text
    assert "runs in one call" in text


@pytest.mark.parametrize("kind", sorted(ROUNDS))
def test_weights_held_as_integers_give_the_tokens_of_transformers_when_rows_are_not_rounded(tmp_path, kind, caplog):
    quantised, floats = checkpoint(kind, "llama", tmp_path)
    found, text = held(quantised, caplog, pack="off")
    assert found == tiny_models.greedy_reference(floats, PROMPT, 8)
    assert "Loaded whole, it is dequantised to float32" in text


@pytest.mark.parametrize("kind", sorted(ROUNDS))
def test_weights_held_as_integers_give_nearly_the_probabilities_of_transformers(tmp_path, kind, caplog):
    """Rows are rounded to 8 bits; a scale or a zero in the wrong place moves log-probabilities by several units."""
    quantised, floats = checkpoint(kind, "qwen3", tmp_path)
    with caplog.at_level("INFO", "trencadis.torch"):
        found = prompt_logprobs(quantised)
    assert_near(found, prompt_logprobs(floats, pack="off"))
    wide = {
        "gptq_v2": "int8 in groups",
        "compressed_int8": "int8 (",
        "gptq_act_order": "int4 in groups of 16, act-order",
    }
    tables = dict.fromkeys(("compressed_nvfp4", "bitsandbytes_nf4"), "4 bit levels in groups of ")
    assert (wide | tables).get(kind, "int4 in groups of 16 ") in caplog.text


def test_experts_of_a_quantised_mixture_give_nearly_the_probabilities_of_transformers(tmp_path):
    quantised, floats = checkpoint("gptq_act_order", "mixtral", tmp_path)
    assert_near(prompt_logprobs(quantised), prompt_logprobs(floats, pack="off"))


def test_a_format_that_is_not_served_is_refused_before_weights_are_read(tmp_path):
    import json

    path = tiny_models.save_model("llama", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "aqlm"}}))
    for backend in ({}, {"pack": "off"}):
        with pytest.raises(ModelLoadError, match=r"quant_method is 'aqlm', which is not served") as caught:
            prompt_logprobs(path, **backend)
        assert "in GGUF" in caught.value.hint


def test_quantised_files_without_a_table_are_refused_with_the_remedy(tmp_path):
    import json

    quantised, _ = checkpoint("awq", "llama", tmp_path)
    config = json.loads((quantised / "config.json").read_text())
    del config["quantization_config"]
    (quantised / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"config\.json has no quantization_config") as caught:
        prompt_logprobs(quantised)
    assert "quant_config.json (AWQ)" in caught.value.hint
