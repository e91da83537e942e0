from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from trencadis.cli import generate_command
from trencadis.client.llm import LLM
from trencadis.config import Config
from trencadis.errors import PromptTooLongError, StepFailedError
from trencadis.records import SamplingParams
from trencadis.registry import Registry
from trencadis.text import Tokenizer
from trencadis_testing.fakes import fake_text

House = Callable[..., tuple[Config, Registry]]


@pytest.fixture
def generate(fake_house: House, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command on a fake backend and returns what it printed."""

    def run(*arguments: str, **backend: Any) -> str:
        parser = argparse.ArgumentParser()
        generate_command.add_arguments(parser)
        config, registry = fake_house(**backend)
        assert generate_command.run(parser.parse_args(arguments), config, registry) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def text_of(fake_house: House) -> Callable[..., str]:
    def text(prompt: str, num_tokens: int) -> str:
        with LLM.from_config(*fake_house()) as llm:
            return llm.generate(prompt, SamplingParams(max_tokens=num_tokens))[0].outputs[0].text

    return text


def test_json_has_text_tokens_prompt_and_reason(generate: Callable[..., str], tokenizer: Tokenizer) -> None:
    record = json.loads(generate("--max-tokens", "16", "--json", "Hello there"))
    prompt = tokenizer.encode("Hello there")
    tokens = fake_text(prompt, 16, vocab_size=4096)
    assert set(record) == {"text", "token_ids", "prompt_token_ids", "finish_reason"}
    assert record["token_ids"] == tokens
    assert record["prompt_token_ids"] == list(prompt)
    assert record["finish_reason"] == "length"
    assert "Hello there" + record["text"] == tokenizer.decode([*prompt, *tokens], skip_special_tokens=True)


@pytest.mark.parametrize("how", ["--stream", "--no-stream"])
def test_several_prompts_are_told_apart(generate: Callable[..., str], text_of: Callable[..., str], how: str) -> None:
    printed = generate("Hello", "Good bye", "--max-tokens", "3", how)
    assert printed == f"[0] Hello\n{text_of('Hello', 3)}\n[1] Good bye\n{text_of('Good bye', 3)}\n"


def test_several_completions_have_an_index_each(generate: Callable[..., str]) -> None:
    lines = generate("Hello", "Bye", "--n", "2", "--max-tokens", "3", "--json").splitlines()
    assert [json.loads(line)["index"] for line in lines] == [0, 1, 0, 1]
    assert generate("Hello", "--n", "2", "--max-tokens", "3", "--stream").startswith("(0) ")


def test_the_score_of_the_best_is_printed_with_it(generate: Callable[..., str]) -> None:
    lines = generate("Hello", "--n", "2", "--best-of", "4", "--max-tokens", "3", "--json").splitlines()
    assert [(json.loads(line)["index"], json.loads(line)["score"]) for line in lines] == [(0, -1.0), (1, -1.0)]


@pytest.mark.parametrize("how", ["--stream", "--no-stream"])
def test_a_chat_prompt_is_a_users_message(generate: Callable[..., str], text_of: Callable[..., str], how: str) -> None:
    expected = text_of("<|user|>Hello<|end|><|assistant|>", 4)
    assert generate("--chat", "Hello", "--max-tokens", "4", how) == expected + "\n"


def test_the_command_is_reproducible_unless_told_otherwise(
    generate: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[SamplingParams] = []
    run = LLM.generate
    monkeypatch.setattr(LLM, "generate", lambda llm, prompts, params: seen.append(params) or run(llm, prompts, params))
    assert generate("x") == generate("x")
    generate("x", "--seed", "none", "--temperature", "0", "--max-tokens", "2")
    assert seen[0] == seen[1] == SamplingParams(seed=0, temperature=0.7, min_p=0.1, max_tokens=64)
    assert seen[2] == SamplingParams(seed=None, temperature=0, min_p=0.1, max_tokens=2)


def test_speculation_is_summed_up_on_standard_error(
    fake_house: House, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = argparse.ArgumentParser()
    generate_command.add_arguments(parser)
    config, registry = fake_house()
    arguments = parser.parse_args(["Hello", "--max-tokens", "5", "--no-stream"])
    generate_command.run(arguments, config, registry)
    assert "speculation" not in capsys.readouterr().err
    opened = LLM.from_config(config, registry)
    named = attrs.evolve(config, speculation=attrs.evolve(config.speculation, name="some"))
    monkeypatch.setattr(LLM, "from_config", lambda _, __: opened)
    generate_command.run(arguments, named, registry)
    told = capsys.readouterr()
    assert told.err.endswith("0 tokens drafted, 0 accepted; 1.00 tokens per step\n")
    assert "speculation some" in told.err
    assert "speculation" not in told.out


@pytest.mark.parametrize("flag", ["--stream", "--no-stream"])
def test_of_several_prompts_one_that_is_too_long_is_named_after_the_others_are_printed(
    generate: Callable[..., str], capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    with pytest.raises(StepFailedError, match=r"1 of 2 prompts failed: .*256"):
        generate("word " * 300, "Hello", flag)
    assert "[1] Hello\n" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--stream", "--no-stream"])
def test_a_single_prompt_that_is_too_long_is_refused(generate: Callable[..., str], flag: str) -> None:
    with pytest.raises(PromptTooLongError, match="256"):
        generate("word " * 300, flag)


def test_a_request_that_fails_is_an_error_after_the_others_are_printed(
    generate: Callable[..., str], capsys: pytest.CaptureFixture[str], tokenizer: Tokenizer
) -> None:
    length = len(tokenizer.encode("one two three four five"))

    def fails(batch: Any, one: Any) -> None:
        if length in one.query_lens:
            raise RuntimeError("too many numbers")

    with pytest.raises(StepFailedError, match=r"1 of 2 prompts failed: .*too many numbers"):
        generate("Hello", "one two three four five", "--json", "--max-tokens", "2", fails=fails)
    good, bad = map(json.loads, capsys.readouterr().out.splitlines())
    assert good["finish_reason"] == "length"
    assert bad["finish_reason"] == "error"
    assert "too many numbers" in bad["error"]
