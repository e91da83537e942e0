from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from trencadis.cli.structured_flags import add_structured_flags, cut_notice, structured_of
from trencadis.errors import ConfigError, InvalidRequestError
from trencadis.records import CompletionOutput, FinishReason, RequestOutput, StructuredOutput


def asked(*arguments: str) -> StructuredOutput | None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_structured_flags(parser)
    return structured_of(parser.parse_args(arguments))


def test_each_flag_asks_for_its_kind(tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"type": "null"}', encoding="utf-8")
    grammar.write_text('start: "é"', encoding="utf-8")
    assert asked() is None
    assert asked("--json-schema", str(schema)) == StructuredOutput.json_schema('{"type": "null"}')
    assert asked("--json-object") == StructuredOutput.json_object()
    assert asked("--regex", "a+") == StructuredOutput.regex("a+")
    assert asked("--choice", "a", "--choice", "b c") == StructuredOutput.choice(["a", "b c"])
    assert asked("--grammar-file", str(grammar)) == StructuredOutput.grammar('start: "é"')


@pytest.mark.parametrize(
    "flags", [["--json-object"], ["--regex", "a"], ["--json-schema", "no.json"], ["--choice", "a"]]
)
def test_a_missing_extra_is_said_before_anything_else(monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        asked(*flags)
    assert str(caught.value) == (
        f"{flags[0]}: structured output needs llguidance, which is not installed. "
        'Run pip install "trencadis[structured]".'
    )
    assert asked() is None


def test_two_of_them_contradict_each_other() -> None:
    with pytest.raises(argparse.ArgumentError, match="not allowed with"):
        asked("--regex", "a", "--choice", "b")


def test_a_file_that_cannot_be_read_is_named_with_its_flag(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"--json-schema '.*nowhere.json' cannot be read"):
        asked("--json-schema", str(tmp_path / "nowhere.json"))
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequestError, match="--grammar-file"):
        asked("--grammar-file", str(binary))
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(InvalidRequestError, match="must be an object"):
        asked("--json-schema", str(tmp_path / "list.json"))


def test_texts_that_were_cut_are_counted() -> None:
    def output(*reasons: FinishReason) -> RequestOutput:
        completions = [
            CompletionOutput(index=i, text="{", token_ids=(1,), finish_reason=reason)
            for i, reason in enumerate(reasons)
        ]
        return RequestOutput(
            request_id="r", prompt=None, prompt_token_ids=(1,), outputs=tuple(completions), finished=True
        )

    whole, cut = FinishReason.STOP, FinishReason.LENGTH
    assert cut_notice([output(whole), output(whole, whole)], max_tokens=6) == ""
    assert cut_notice([output(whole), output(cut, whole)], max_tokens=6).startswith(
        "1 of 3 texts were cut after 6 tokens"
    )
