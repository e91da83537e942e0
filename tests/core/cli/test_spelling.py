"""Flags without their table, and flags of other engines: each is taken, or answered with ours."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from docs_pages.configuration import built_in_settings
from trencadis.cli import main
from trencadis.cli.spelling import refuse_foreign_flags, whole_flags
from trencadis.config import Setting
from trencadis.errors import ConfigError
from trencadis.other_engines import counterparts, sections

SETTINGS = built_in_settings()
FLAGS = sorted(
    {flag for section in sections() for row in section.rows for names in row.flags.values() for flag in names}
)
OWN = ["--temperature", "--max-tokens", "--config"]


def short(setting: Setting) -> str:
    return f"--{setting.key.replace('_', '-')}"


def whole(*line: str) -> list[str]:
    return whole_flags(line, OWN, lambda: SETTINGS, command="trencadis serve")


def answer(*line: str, own: list[str] = OWN) -> str:
    with pytest.raises(ConfigError) as caught:
        refuse_foreign_flags(line, own, lambda: SETTINGS, command="trencadis serve")
    return str(caught.value)


def test_every_flag_may_be_written_without_its_table_where_its_key_is_in_one_only() -> None:
    """Of all settings: taken, or an error that lists the tables; those of other engines with another meaning are answered."""
    keys = [setting.key for setting in SETTINGS]
    num_taken = 0
    for setting in SETTINGS:
        line, same = [short(setting), "7"], [setting.flag, "7"]
        foreign = counterparts(short(setting))
        is_ours = not foreign or any(row.is_same and row.settings == (setting.path,) for row in foreign)
        if setting.secret or (foreign and not is_ours):
            assert whole(*line) == line
        elif keys.count(setting.key) == 1:
            assert whole(*line) == same
            num_taken += 1
        elif not foreign:
            with pytest.raises(ConfigError) as caught:
                whole(*line)
            assert all(one.flag in str(caught.value) for one in SETTINGS if one.key == setting.key)
        else:
            assert whole(*line) == line
    assert num_taken > 200


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["--max-num-seqs", "64"], ["--engine.max-num-seqs", "64"]),
        (["--max_num_seqs=64"], ["--engine.max-num-seqs=64"]),
        (["hi", "--max-model-len=8", "there"], ["hi", "--model.max-model-len=8", "there"]),
        (["--", "--max-model-len", "8"], ["--", "--max-model-len", "8"]),
        (["--temperature", "0"], ["--temperature", "0"]),
        (["--engine.seed", "3"], ["--engine.seed", "3"]),
        (["--no-such"], ["--no-such"]),
        # unique here, and of another meaning there
        (["--embeddings"], ["--embeddings"]),
        (["--kv-cache-dtype", "int8"], ["--kv-cache-dtype", "int8"]),
    ],
)
def test_a_clear_key_gets_its_table(line: list[str], expected: list[str]) -> None:
    assert whole(*line) == expected


def test_every_flag_of_another_engine_is_taken_or_answered() -> None:
    num_answered = 0
    for flag in FLAGS:
        if whole(flag) != [flag]:
            continue
        said = answer(flag, own=[])
        assert said.startswith((f"trencadis serve: {flag} is a flag of ", "trencadis serve: flags of other engines:"))
        for row in counterparts(flag):
            ours = [SETTINGS.get(path) for path in row.settings]
            assert all(setting is not None and (setting.secret or setting.flag in said) for setting in ours)
            assert row.flag in said
        num_answered += 1
    assert num_answered > 200


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        (["--tensor-parallel-size", "2"], "--parallel.tensor 2 "),
        (["--tp=4"], "--parallel.tensor 4 "),
        (["--gpu-memory-utilization", "0.9"], "--cache.memory-fraction 0.9 (a share of the memory that is left"),
        (["-c", "4096"], "--model.max-model-len 4096"),
        (["-hf", "a/b"], "--model.path a/b"),
        (["--served-model-name", "my model"], '--server.model-name "my model"'),
        (["--swap-space", "4"], "--cache.swap-bytes 4294967296"),
        (["--kv-cache-dtype", "int8"], "--backend.torch.kv-dtype int8 or --backend.gaudi.kv-cache-dtype int8"),
        (["--no-enable-prefix-caching"], "--cache.prefix-caching false"),
        (["--disable-radix-cache", "word"], "--cache.prefix-caching false."),
        (["--enable-lora"], "there is none: adapters are not served: merge one into the weights first"),
        (["--temp", "0.3"], "--temperature 0.3."),
        (["-n", "-1"], "--max-tokens -1."),
        (["--ssl-keyfile", "k.pem"], "there is none: TLS is the proxy's"),
        (["-ngl", "99"], "there is none: all weights are on one kind of device, which backend.torch.device names"),
    ],
)
def test_the_answer_has_our_flag_with_the_value_that_was_given(line: list[str], ours: str) -> None:
    assert f"Here {'' if ours.startswith('there') else 'it is '}{ours}" in answer(*line)


def test_a_flag_of_generate_is_named_where_the_command_has_none() -> None:
    assert "Here it is --temperature of trencadis generate, run and chat" in answer("--temp", "0.3", own=[])


@pytest.mark.parametrize("flag", ["--api-key", "--api-keys", "--admin-api-key", "--hf-token"])
def test_a_key_is_not_repeated_and_the_answer_says_how_to_give_it(flag: str) -> None:
    said = answer(flag, "sk-very-secret")
    assert "sk-very-secret" not in said
    assert "the variable" in said


def test_all_flags_of_other_engines_are_answered_at_once() -> None:
    lines = answer("--tp", "2", "word", "--ctx-size", "8").splitlines()
    assert lines[0] == "trencadis serve: flags of other engines:"
    assert [line.split()[0] for line in lines[1:]] == ["--tp", "--ctx-size"]


def test_what_is_no_flag_of_another_engine_is_left_alone() -> None:
    refuse_foreign_flags(["--temperature", "-1", "--no-such", "--", "-c"], OWN, lambda: SETTINGS, command="x")


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*line: str) -> str:
        assert main([*line]) == 2
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    "command", [["serve"], ["generate", "hi"], ["doctor"], ["run", "demo"], ["bench", "throughput"], ["config"]]
)
def test_commands_answer(said: Callable[..., str], command: list[str]) -> None:
    assert "Here it is --parallel.tensor 2" in said(*command, "--tensor-parallel-size", "2")


def test_a_flag_that_is_close_to_a_clear_key_is_suggested(said: Callable[..., str]) -> None:
    assert 'unknown argument --max-num-seq. Did you mean "--max-num-seqs"?' in said("serve", "--max-num-seq", "2")


@pytest.mark.parametrize("command", ["list", "ls", "pull", "ps", "show", "launch_server", "llama-server"])
def test_commands_of_other_engines_say_what_does_it_here(said: Callable[..., str], command: str) -> None:
    line = said(command)
    assert line.startswith(f"error: trencadis: {command} is a command of other engines. Here ")


def test_a_model_is_given_once(said: Callable[..., str]) -> None:
    assert 'the model is given twice: "a" and --model.path b. Leave out one.' in said("serve", "a", "--model", "b")


@pytest.mark.parametrize(
    "line", [["serve", "no/such-model"], ["serve", "-m", "no/such-model"], ["generate", "--model=no/such-model", "hi"]]
)
def test_the_model_that_is_named_is_the_one_that_is_loaded(
    line: list[str], said: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "no/such-model" in said(*line, "--engine.placement", "thread")


def test_a_clear_key_reaches_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--max-num-seqs", "63"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("engine.max_num_seqs "))
    assert row.split()[1:5] == ["63", "flag", "--engine.max-num-seqs", "sequences"]


def test_a_clear_key_of_the_plugins_table_is_known_before_plugins_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--flags", "--blocked", "gaudi"]) == 0
    assert "--backend.gaudi.device" not in capsys.readouterr().out
