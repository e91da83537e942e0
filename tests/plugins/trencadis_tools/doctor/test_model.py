from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from support.backends import tiny_models
from support.template_zoo import HOSTILE, ZOO
from support.tokenizer_zoo import ZOO as TOKENIZERS
from trencadis.config import Config
from trencadis.config.schema import ModelConfig
from trencadis.text import resolve_model_path
from trencadis_tools.doctor.model import check_model, facts_of

DEMO = Path(resolve_model_path("demo"))


def config(path) -> Config:
    return Config(model=ModelConfig(path=str(path)))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The demo model, to be damaged."""
    shutil.copytree(DEMO, tmp_path / "model")
    return tmp_path / "model"


def wrong(found):
    return [(item.message, item.remedy) for item in found if item.severity.value == "fail"]


def test_demo_is_sound_and_its_facts_are_read(found, told):
    facts = check_model(found, config("demo"), {})
    assert {kind for kind, _ in told()} == {"ok"}
    assert (facts.vocab_size, facts.max_model_len, facts.architecture) == (4096, 2048, "LlamaForCausalLM")
    # 2 (key and value) × 5 layers × 4 heads × 32 dimensions × 2 bytes
    assert facts.kv_bytes_per_token == 2560
    assert any("with a chat template" in message for _, message in told())


@pytest.mark.parametrize(
    ("name", "words"), [("llama2", "it decodes its 400 tokens to their bytes"), ("gpt1", "will be refused")]
)
def test_whether_structured_output_can_be_kept_with_the_tokenizer_is_told(found, told, copy, tmp_path, name, words):
    whole = Config(model=ModelConfig(path=str(copy), tokenizer=TOKENIZERS[name].make(tmp_path / "tokenizer")))
    check_model(found, whole, {})
    (message,) = (message for _, message in told() if "structured output" in message)
    assert words in message
    assert ("have the bytes" in message) == (name == "gpt1")


def test_ends_of_a_turn_are_listed_with_their_sources(found, told, copy):
    for name, end in (("config.json", 9), ("generation_config.json", [7, 9])):
        values = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps({**values, "eos_token_id": end}))
    check_model(found, config(copy), {})
    assert any(
        message.startswith("ends of a turn: 7 $ (generation_config.json); 9 & (generation_config.json, config.json); ")
        and message.endswith("0 <|end|> (tokenizer, chat template)")
        for _, message in told()
    )


def test_form_of_content_that_the_template_wants_is_shown(found, told, copy):
    check_model(found, config(copy), {})
    (copy / "chat_template.jinja").write_text(ZOO["mixed"].source)
    check_model(found, config(copy), {})
    forms = [message for _, message in told() if message.startswith("chat template: ")]
    assert forms == [
        "chat template: content as text",
        "chat template: content of user, assistant, tool as parts; content of system as text",
    ]


def test_model_whose_texts_never_end_is_doubtful(found, told, copy):
    for name, key in (
        ("config.json", "eos_token_id"),
        ("generation_config.json", "eos_token_id"),
        ("tokenizer_config.json", "eos_token"),
    ):
        values = json.loads((copy / name).read_text())
        del values[key]
        (copy / name).write_text(json.dumps(values))
    (copy / "chat_template.jinja").write_text(ZOO["plain"].source)
    check_model(found, config(copy), {})
    assert ("warn", "ends of a turn: none; every text runs on to max_tokens") in told()


def test_path_that_leads_nowhere_is_wrong_and_shown_with_who_set_it(found, tmp_path):
    for path in (tmp_path / "no", "./no/such", "no.gguf", "a/b/c"):
        assert check_model(found, config(path), {}) is None
    assert check_model(found, config("/no/such"), {"model.path": "flag --model.path"}) is None
    for message, remedy in wrong(found):
        assert "no such file or directory" in message
        assert "Correct model.path" in remedy
    assert len(wrong(found)) == 5
    shown = '[model] path = "/no/such" (from flag --model.path): there is no such file or directory'
    assert wrong(found)[-1][0] == shown


def test_hub_id_that_the_hub_may_not_be_asked_for_is_wrong(found):
    found.run("model", check_model, config("nobody/no-such-model"), {})
    ((message, remedy),) = wrong(found)
    assert message.endswith("the hub may not be asked: HF_HUB_OFFLINE is set, and no model of that id is in the cache.")
    assert remedy.startswith("Unset it, or correct the path.")


def test_hub_id_that_the_hub_knows_is_doubtful_until_it_is_fetched(found, told, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: None)
    assert check_model(found, config("nobody/no-such-model"), {}) is None
    ((kind, message),) = told()
    assert kind == "warn"
    assert "taken for a hub id" in message


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda copy: (copy / "config.json").unlink(), "config.json is missing"),
        (lambda copy: (copy / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda copy: os.truncate(copy / "model.safetensors", 10**6), "model.safetensors is cut off"),
        (lambda copy: [(copy / f"tokenizer{end}.json").unlink() for end in ("", "_config")], "holds no tokenizer"),
        pytest.param(
            lambda copy: (copy / "chat_template.jinja").write_text(HOSTILE["loops"]),
            "ran longer than 2 s and was stopped",
            marks=pytest.mark.nightly,  # that errors of checks are findings: test_findings.py
        ),
    ],
    ids=["no configuration", "broken configuration", "cut weights", "no tokenizer", "template that loops"],
)
@pytest.mark.representatives(5)
def test_damaged_directory_is_wrong_by_its_first_fault(found, copy, damage, message):
    damage(copy)
    check_model(found, config(copy), {})
    assert message in wrong(found)[0][0]


def test_missing_chat_template_and_a_tokenizer_of_another_model_are_doubtful(found, told, copy):
    (copy / "chat_template.jinja").unlink()
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    description = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**description, "vocab_size": 2000}))
    check_model(found, config(copy), {})
    doubtful = [message for kind, message in told() if kind == "warn"]
    assert any("no chat template: chats will be refused" in message for message in doubtful)
    assert any("knows 4096 tokens, the model 2000" in message for message in doubtful)


def test_a_gguf_file_is_described(found, told, tmp_path):
    pytest.importorskip("gguf")
    check_model(found, config(tiny_models.save_gguf(tmp_path)), {})
    assert any("llama, .gguf, 0 MiB of weights: F32 (100 %)" in message for _, message in told())


def test_file_that_is_no_gguf_is_wrong(found, tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"nonsense")
    (tmp_path / "a.bin").write_bytes(b"nonsense")
    check_model(found, config(tmp_path / "a.gguf"), {})
    check_model(found, config(tmp_path / "a.bin"), {})
    messages = [message for message, _ in wrong(found)]
    assert any("does not begin with GGUF" in message or "takes the package gguf" in message for message in messages)
    assert any("a file, but no .gguf file" in message for message in messages)


TWO_LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("told_by_file", "kv_bytes"),
    [
        (TWO_LAYERS | {"hidden_size": 64, "torch_dtype": "float32"}, 2 * 2 * 64 * 4),
        (TWO_LAYERS | {"head_dim": 8, "num_key_value_heads": 1, "dtype": "float16"}, 64),
        ({"text_config": TWO_LAYERS | {"hidden_size": 8, "dtype": "bfloat16"}}, 64),
        ({}, 0),
    ],
)
def test_kv_cache_follows_from_the_dimensions(told_by_file, kv_bytes):
    assert facts_of(told_by_file, 0).kv_bytes_per_token == kv_bytes
