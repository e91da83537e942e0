"""``generate`` and ``serve`` on a terminal of 80 columns: what a newcomer sees from the first second to the last."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from support.core.loud_backend import WORDS
from support.eventually import PATIENCE_S
from support.terminal import Terminal, look_at

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"PYTHONPATH": str(ROOT / "tests")}
LONG_S = 5 * PATIENCE_S
PROMPT = "The old man looked at the sea and"
FIGURES = re.compile(r"\d+ tokens · [\d.]+ tokens/s · first token after [\d.]+ s")
GENERATE = "generate", "Hello", "--temperature", "0", "--min-p", "0", "--seed", "none", "--max-tokens"
CONFIG = """
[backend]
name = "support.core.{name}"
options = {options}
[sampling]
name = "trencadis_testing.backend:ArgmaxSampler"
[engine]
warmup = false
[cache]
num_blocks = 512
block_size = 4
[server]
port = 0
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "trencadis", *arguments]


def fake(folder: Path, *arguments: str, name: str = "loud_backend:LoudBackend", options: str = "{}") -> list[str]:
    """Return a command on a device that is no device, and loads in no time."""
    path = folder / "fake.toml"
    path.write_text(CONFIG.format(name=name, options=options))
    return command(arguments[0], "--config", str(path), *arguments[1:])


def parts_of(terminal: Terminal) -> list[str]:
    """Return the parts of loading that were shown for a moment, in order."""
    found = [
        match[1].strip()
        for frame in terminal.frames
        for line in frame
        if (match := re.match(r". Loading demo: ([^·]*)· \d+ s", line))
    ]
    return list(dict.fromkeys(found))


def words_of(lines: list[str]) -> list[str]:
    return " ".join(lines).split()


@pytest.mark.slow
def test_generate_shows_progress_that_goes_away_then_prompt_text_and_figures() -> None:
    # First: on a new machine it compiles the kernels, and says so.
    piped = subprocess.run(
        command("generate", PROMPT, "--max-tokens", "48"), capture_output=True, text=True, check=True, timeout=LONG_S
    )
    terminal = look_at(command("generate", PROMPT, "--max-tokens", "48"), within_s=LONG_S)
    assert terminal.process.returncode == 0, terminal.text
    *text, figures = terminal.lines
    assert FIGURES.fullmatch(figures)
    assert figures.startswith("48 tokens · ")
    assert terminal.wrapped == []
    parts = parts_of(terminal)
    assert "imports" in parts, parts
    assert terminal.text.startswith(PROMPT)
    assert not re.search(r"INFO|WARNING|Loading", terminal.text)

    # Piped, standard output is the text alone; on the terminal it is the same text, and none of its words is cut.
    assert words_of(text) == f"{PROMPT}{piped.stdout}".split()
    assert "\x1b" not in piped.stdout + piped.stderr
    assert "INFO" in piped.stderr


@pytest.mark.representatives(1)
@pytest.mark.parametrize("placement", ["thread", "process"])
def test_what_is_logged_while_text_is_streamed_comes_after_it(tmp_path: Path, placement: str) -> None:
    """What a library that is not Python's writes in the engine's process as well."""
    writes = str(placement == "process").lower()
    streaming = fake(tmp_path, *GENERATE, "32", "--engine.placement", placement, options=f"{{writes = {writes}}}")
    terminal = look_at(streaming, within_s=LONG_S, env=ENVIRONMENT)
    assert terminal.process.returncode == 0, terminal.text
    assert terminal.wrapped == []
    lines = terminal.lines
    assert re.fullmatch(r"[\d-]+ [\d:]+ WARNING trencadis.loud: A warning while it loads\.", lines[0])
    begin = next(number for number, line in enumerate(lines) if line.startswith("Hello"))
    first = next(number for number, line in enumerate(lines) if number > begin and "WARNING" in line)
    text, after = " ".join(lines[begin:first]), " ".join(line.strip() for line in lines[first:])
    assert not re.search("warning|step|library", text)
    assert after.count(f"WARNING trencadis.loud: {WORDS}") >= 30
    assert (lines.count("Words of a library.") >= 30) is (placement == "process")
    # The words of a library come through a pipe of their own: on a busy machine some come after the figures.
    assert FIGURES.fullmatch([line for line in lines if line != "Words of a library."][-1])


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_generate_says_what_stopped_it_in_the_background_too_and_verbose_what_happens(
    tmp_path: Path, number: int, name: str
) -> None:
    """A background job ignores Ctrl-C."""
    options = {"name": "paced_backend:PacedBackend", "options": "{step_s = 0.2}"}
    paced = fake(tmp_path, *GENERATE, "200", "-v", **options)
    if number == signal.SIGTERM:
        paced = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *paced]
    with Terminal(paced, env=ENVIRONMENT) as terminal:
        terminal.wait_for("Hello", within_s=LONG_S)
        if number == signal.SIGINT:
            terminal.type("\x03")
        else:
            terminal.process.send_signal(number)
        assert terminal.wait() == 128 + number
    assert terminal.lines[-1] == f"trencadis generate was stopped by {name}."
    assert " INFO trencadis.engine: The engine took" in terminal.text
    assert "Traceback" not in terminal.text


@pytest.mark.representatives(1)
@pytest.mark.parametrize("placement", ["process", "thread"])
def test_ctrl_c_stops_a_load_at_once(tmp_path: Path, placement: str) -> None:
    endless = fake(tmp_path, "generate", "Hello", "--engine.placement", placement, name="loud_backend:EndlessBackend")
    with Terminal(endless, env=ENVIRONMENT) as terminal:
        terminal.wait_for("Loading demo: imports", within_s=LONG_S)
        terminal.type("\x03")
        assert terminal.wait() == 128 + signal.SIGINT
    assert terminal.lines[-1] == "trencadis generate was stopped by Ctrl-C."
    assert "Traceback" not in terminal.text


def test_serve_names_the_phase_leaves_the_ready_line_logs_below_it_and_says_why_it_ended(tmp_path: Path) -> None:
    with Terminal(fake(tmp_path, "serve"), env=ENVIRONMENT) as terminal:
        terminal.wait_for("Ready: ", within_s=LONG_S)
        url = re.search(r"http://[\d.:]+", terminal.text)
        assert url is not None
        answer = httpx.post(
            f"{url[0]}/v1/completions", json={"model": "demo", "prompt": [5], "max_tokens": 3}, timeout=LONG_S
        )
        assert answer.status_code == 200
        terminal.wait_for(" INFO ", within_s=LONG_S)
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.wait(within_s=LONG_S) == 0
    listening, warning, ready, *rest, stopped = terminal.lines
    assert listening.startswith("Listening at http://127.0.0.1:")
    assert warning.endswith(" WARNING trencadis.loud: A warning while it loads.")
    assert ready.startswith("Ready: Fake, float32, 256 tokens, plan")
    assert " INFO " in " ".join(rest)
    assert "SIGTERM: shutting down in order; a second signal ends it at once." in rest
    assert stopped == "trencadis serve was stopped by SIGTERM."
    assert terminal.wrapped == []
    assert parts_of(terminal)
    assert all("\n".join(frame).count("Loading demo") <= 1 for frame in terminal.frames)
