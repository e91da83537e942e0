"""``chat`` and ``run`` as a person sees them on a terminal of 80 columns, and from a pipe; the demo model."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator

import pytest

from support.terminal import Terminal, look_at
from trencadis.cli import main

LOADING_S = 300.0
TRENCADIS = [sys.executable, "-m", "trencadis"]
UP = "\x1b[A"


@pytest.fixture(scope="module")
def terminal() -> Iterator[Terminal]:
    """One conversation, which the tests of this file go on with one after the other."""
    with Terminal([*TRENCADIS, "chat", "demo", "--max-tokens", "24"]) as opened:
        opened.wait_for("leaves.\n>>>", within_s=LOADING_S)
        yield opened


def after(terminal: Terminal, line: str, *, until: str = "\n>>>") -> str:
    """Type a line, and return what is shown below it once the next prompt, or another text, is."""
    num_lines = len(terminal.lines)
    terminal.type(line)
    while until not in "\n".join(["", *terminal.lines[num_lines:]]):
        assert terminal._read(LOADING_S), terminal.text
    return "\n".join(terminal.lines[num_lines:])


def test_a_conversation_on_a_terminal(terminal: Terminal) -> None:
    greeting = terminal.lines[-2]
    assert greeting == "demo: /help lists the words, /exit or Ctrl-D leaves."
    first = after(terminal, "Who is there?\r")
    assert len(first.splitlines()) >= 2
    assert "INFO" not in terminal.text

    assert 'Did you mean "temperature"?' in " ".join(after(terminal, "/set temprature 2\r").split())
    assert "temperature = 0.0" in after(terminal, "/set temperature 0\r")
    assert "system: You are a king." in after(terminal, "/system You are a king.\r")
    assert "Nothing was said so far." in after(terminal, "/reset\r")
    greedy = after(terminal, "Who is there?\r")
    after(terminal, "/reset\r")
    assert after(terminal, f"{UP}{UP}\r") == greedy  # the history of the input has the message before the last word

    assert "ignore_eos = true" in after(terminal, "/set ignore_eos true\r")
    assert "max_tokens = 1500" in after(terminal, "/set max_tokens 1500\r")
    num_lines = len(terminal.lines)
    terminal.type("Tell me a story\r")
    while len(terminal.lines) < num_lines + 3:  # the answer has begun, and goes on
        assert terminal._read(LOADING_S), terminal.text
    terminal.type("\x03")
    terminal.wait_for("(stopped)\n>>>", within_s=LOADING_S)
    assert "^C" not in terminal.text

    assert after(terminal, "half a line\x03").endswith(">>>")  # taken back
    assert "leaves, /help lists all." in after(terminal, "/bye\r")
    assert terminal.wrapped == []
    terminal.type("\x04")
    assert terminal.wait() == 0


def test_a_prompt_is_answered_on_a_terminal_between_words_and_without_log() -> None:
    seen = look_at(
        [*TRENCADIS, "run", "demo", "Who is there?", "--max-tokens", "60", "--ignore-eos"], within_s=LOADING_S
    )
    assert seen.process.returncode == 0
    assert seen.wrapped == []
    assert len(seen.text.split()) > 20
    assert "INFO" not in seen.text


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command with text on its standard input; returns its status, and what it printed on both streams."""

    def run(text: str, *line: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        code = main([*line, "--max-tokens", "6", "--temperature", "0", "--log.level", "error"])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_each_line_of_a_pipe_is_a_message_and_words_work(piped: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = piped("Who is there?\n\nWho is there?\n/reset\nWho is there?\n/exit\nnot read\n", "chat", "demo")
    assert code == 0, err
    answers = out.splitlines()
    assert len(answers) == 3
    assert answers[0] == answers[2] != answers[1]
    assert "Nothing was said so far." in err


def test_a_message_of_a_pipe_that_is_refused_ends_it(piped: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = piped("/set temprature 2\nWho is there?\n", "chat", "demo")
    assert (code, out) == (2, "")
    assert 'Did you mean "temperature"?' in err


def test_run_takes_its_prompt_from_a_pipe_or_joins_the_words_it_is_given(
    piped: Callable[..., tuple[int, str, str]],
) -> None:
    code, out, err = piped("Who is there?\n", "run", "demo")
    assert (code, len(out.splitlines())) == (0, 1), err
    assert piped("not read", "run", "demo", "Who", "is", "there?")[1] == out
    assert piped(" \n", "run", "demo")[2].startswith("error: there is no prompt.")


def test_several_answers_are_refused_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "/no/such/model", "-n", "2"]) == 2
    assert "-n is a flag of llama.cpp. Here it is --max-tokens 2." in capsys.readouterr().err
    assert main(["chat", "/no/such/model", "--n", "2"]) == 2
    assert "one answer to each message" in capsys.readouterr().err
