"""Who writes to a terminal, and where: each program runs on a pseudo-terminal of its own."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
import textwrap

import pytest

from support.terminal import Terminal, look_at
from trencadis.screen import stream_text, write_line


def shown(program: str, *, columns: int = 40) -> Terminal:
    terminal = look_at([sys.executable, "-c", textwrap.dedent(program)], columns=columns)
    assert terminal.process.returncode == 0, terminal.text
    return terminal


def test_words_of_a_streamed_text_are_not_cut_at_the_edge() -> None:
    words = " ".join(f"word{number}" * (1 + number % 3) for number in range(60))
    terminal = shown(f"""
        from trencadis.screen import stream_text
        with stream_text() as writer:
            for char in {words!r}:
                writer.write(char)
    """)
    assert terminal.wrapped == []
    assert " ".join(terminal.lines).split() == words.split()
    assert max(map(len, terminal.lines)) > 30


def test_a_word_that_is_longer_than_a_line_goes_on_in_the_next() -> None:
    terminal = shown("""
        from trencadis.screen import stream_text
        with stream_text() as writer:
            writer.write("ab " + "x" * 100 + " cd\\tef")
    """)
    assert terminal.wrapped == []
    assert re.sub(r"\n", "", terminal.text).replace(" ", "") == "ab" + "x" * 100 + "cdef"


def test_a_streamed_text_cannot_command_the_terminal() -> None:
    terminal = shown("""
        from trencadis.screen import stream_text
        with stream_text() as writer:
            writer.write("before\\x1b[2J\\x1b]0;title\\x07\\x9b1Aafter")
    """)
    assert terminal.lines == ["before�[2J�]0;title��1Aafter"]


def test_wide_characters_take_two_columns() -> None:
    terminal = shown("""
        from trencadis.screen import stream_text
        with stream_text() as writer:
            writer.write("海" * 50)
    """)
    assert terminal.wrapped == []
    assert terminal.text.replace("\n", "").replace(" ", "") == "海" * 50


def test_lines_wait_for_the_end_of_a_text_and_keep_their_order() -> None:
    terminal = shown("""
        from trencadis.screen import stream_text, write_line
        write_line("first")
        with stream_text() as writer:
            writer.write("Once upon")
            write_line("second")
            writer.write(" a time", dim=True)
            write_line("third")
    """)
    assert terminal.lines == ["first", "Once upon a time", "second", "third"]


def test_lines_that_waited_are_shown_if_the_text_is_interrupted() -> None:
    terminal = look_at(
        [
            sys.executable,
            "-c",
            "from trencadis.screen import stream_text, write_line\n"
            "try:\n    with stream_text() as writer:\n        writer.write('Once'); write_line('why'); raise KeyboardInterrupt\n"
            "except KeyboardInterrupt:\n    write_line('ended')",
        ]
    )
    assert terminal.lines == ["Once", "why", "ended"]


def test_lines_go_above_progress_which_goes_away() -> None:
    program = textwrap.dedent("""
        import signal, subprocess, sys
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        from trencadis.screen import child_stderr, drain_children, progress_line, write_line
        with progress_line(lambda columns: "doing it " + "and more of it " * 20):
            signal.sigwait({signal.SIGUSR1})
            write_line("a line")
            with progress_line(lambda columns: "inner"):
                child = "import os; [os.write(2, b'line %d of a child\\\\n' % n) for n in range(20)]; os.write(2, b'part')"
                subprocess.run([sys.executable, "-c", child], stderr=child_stderr(), check=True)
                drain_children()
                signal.sigwait({signal.SIGUSR1})
            print("of a library", file=sys.stderr)
        print("end")
    """)
    with Terminal([sys.executable, "-c", program], columns=40, rows=60) as terminal:
        for progress in ("doing it and more", "inner"):
            terminal.wait_for(progress)
            terminal.process.send_signal(signal.SIGUSR1)
        assert terminal.wait() == 0
    assert terminal.lines == ["a line", *(f"line {n} of a child" for n in range(20)), "part", "of a library", "end"]
    assert terminal.wrapped == []


def test_long_lines_are_folded_between_words_and_indented() -> None:
    terminal = shown("""
        from trencadis.screen import write_line
        write_line("10:00:00 WARNING trencadis: the cache has room for two sequences")
        write_line("  the cache has room for two sequences at once")
        write_line("    indented = 1")
    """)
    assert terminal.lines == [
        "10:00:00 WARNING trencadis: the cache",
        "  has room for two sequences",
        "  the cache has room for two sequences",
        "    at once",
        "    indented = 1",
    ]


def test_a_text_that_goes_elsewhere_is_written_as_it_is() -> None:
    out = io.StringIO()
    with stream_text(out) as writer:
        writer.write("Once\x1b[2m " + "upon " * 50, dim=True)
        writer.write("\r\n")
    assert out.getvalue() == "Once\x1b[2m " + "upon " * 50 + "\r\n"


def test_without_a_terminal_lines_come_at_once_and_processes_have_our_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with stream_text() as writer:
        writer.write("text")
        write_line("a line that is long " * 10)
        assert capsys.readouterr().err == "a line that is long " * 10 + "\n"
    done = subprocess.run(
        [sys.executable, "-c", "from trencadis.screen import child_stderr; print(child_stderr())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "None\n"
