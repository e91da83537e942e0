"""The pseudo-terminal of the tests shows what a person would see."""

from __future__ import annotations

import sys

from support.terminal import Terminal, look_at


def test_long_lines_are_noted_and_overwritten_ones_seen_for_a_moment() -> None:
    program = (
        "import sys; print('a' * 81); print('gone', end='', flush=True); input(); print('\\rhere', sys.stdout.isatty())"
    )
    with Terminal([sys.executable, "-c", program]) as terminal:
        terminal.wait_for("gone")
        terminal.type("\r")
        assert terminal.wait() == 0
    assert terminal.wrapped == ["a" * 80]
    assert terminal.lines[:2] == ["a" * 80, "a"]
    assert terminal.lines[-1] == "here True"
    assert any("gone" in line for frame in terminal.frames for line in frame)


def test_lines_that_scrolled_away_are_kept() -> None:
    assert look_at([sys.executable, "-c", "for i in range(100): print(i)"]).lines == [str(i) for i in range(100)]


def test_control_c_reaches_the_command() -> None:
    program = "import time\ntry:\n    print('up', flush=True)\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    print('stopped')"
    with Terminal([sys.executable, "-c", program]) as terminal:
        terminal.wait_for("up")
        terminal.type("\x03")
        terminal.wait_for("stopped")
        assert terminal.wait() == 0
