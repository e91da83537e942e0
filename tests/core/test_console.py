from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
from collections.abc import Callable, Iterator

import pytest

from trencadis.clock import SimulatedClock
from trencadis.console import on_terminal, print_table, print_text, track


def test_elsewhere_one_line_says_what_how_much_and_how_long(caplog: pytest.LogCaptureFixture) -> None:
    clock = SimulatedClock()
    with (
        caplog.at_level(logging.INFO, logger="trencadis"),
        track("Eating", total=3, unit="figs", show=False, clock=clock) as advance,
    ):
        for done in (1, 2, 3):
            advance(done)
            clock.advance(0.5)
    assert [record.getMessage() for record in caplog.records] == ["Eating: 3 figs in 1.5 s"]


def test_long_work_says_now_and_then_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    clock = SimulatedClock()
    with (
        caplog.at_level(logging.INFO, logger="trencadis"),
        track("Eating", unit="figs", show=False, clock=clock) as advance,
    ):
        for done in range(1, 81):
            clock.advance(1.0)
            advance(done, 416)
    assert [record.getMessage() for record in caplog.records] == [
        "Eating: 30 of 416 figs after 30 s",
        "Eating: 60 of 416 figs after 60 s",
        "Eating: 80 figs in 80.0 s",
    ]


def test_a_bar_counts_on_standard_error_and_logs_nothing(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with caplog.at_level(logging.INFO, logger="trencadis"), track("Eating", total=2, unit="figs", show=True) as advance:
        advance(1)
        advance(2, 4)
    shown = capsys.readouterr()
    assert "Eating" in shown.err
    assert "2/4 figs" in shown.err
    assert shown.out == ""
    assert caplog.records == []


@pytest.mark.parametrize("is_terminal", [True, False])
def test_bars_are_for_terminals(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    assert on_terminal() is is_terminal


HEADINGS = ("name", "meaning")
ROWS = [("a", "first [red] one"), ("longer", "")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_table_in_a_file_is_plain_and_aligned() -> None:
    out = io.StringIO()
    print_table(HEADINGS, ROWS, stream=out)
    assert out.getvalue().splitlines() == ["name    meaning", "a       first [red] one", "longer"]


def on_columns(columns: int, headings: tuple[str, ...], rows: list[tuple[str, ...]], monkeypatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = Terminal()
    print_table(headings, rows, stream=out)
    lines = [line.rstrip() for line in re.sub("\x1b[^m]*m", "", out.getvalue()).splitlines()]
    assert all(len(line) <= columns for line in lines)
    return lines


def test_a_table_on_a_terminal_wraps_in_its_last_column_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("a_name_of_some_length", "is explained in more words than there is room for in one line")]
    assert on_columns(50, HEADINGS, rows, monkeypatch) == [
        "name                   meaning",
        "a_name_of_some_length  is explained in more words",
        "                       than there is room for in",
        "                       one line",
    ]


def test_rows_that_leave_no_room_for_the_last_column_become_paragraphs(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("a_name_of_some_length", "a_value_of_some_length", "", "in more words than there is room for")]
    assert on_columns(50, ("name", "value", "unit", "meaning"), rows, monkeypatch) == [
        "a_name_of_some_length",
        "  value: a_value_of_some_length",
        "  meaning: in more words than there is room for",
    ]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_paragraph_is_wrapped_on_terminals_alone(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    out = Terminal() if is_terminal else io.StringIO()
    print_text("more words than there is room for", indent="  ", stream=out)
    whole, wrapped = ["more words than there is room for"], ["more words than", "  there is room for"]
    assert out.getvalue().splitlines() == (wrapped if is_terminal else whole)


def test_progress_says_what_which_part_how_many_of_how_many_and_how_long_it_will_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[Callable[[int], str]] = []

    @contextlib.contextmanager
    def progress_line(render: Callable[[int], str]) -> Iterator[None]:
        lines.append(render)
        yield

    monkeypatch.setattr("trencadis.console.progress_line", progress_line)
    clock, part = SimulatedClock(), ["weights"]
    with track("Loading demo", unit="buckets", show=True, part=lambda: part[0], clock=clock) as advance:

        def seen(columns: int = 79) -> str:
            return lines[0](columns)[2:]

        assert seen() == "Loading demo: weights · 0 s"
        clock.advance(4.0)
        part[0] = "warm-up"
        advance(0, 174)
        assert seen() == "Loading demo: warm-up 0/174 buckets · 4 s"
        clock.advance(30.0)  # the first takes its time, and is no guide
        advance(1, 174)
        assert seen() == "Loading demo: warm-up 1/174 buckets · 34 s"
        clock.advance(10.0)
        advance(11, 174)
        assert seen() == "Loading demo: warm-up 11/174 buckets · 44 s · about 2 min 43 s left"
        clock.advance(163.0)
        advance(174, 174)
        assert seen() == "Loading demo: warm-up 174/174 buckets · 3 min 27 s"


def test_a_long_name_is_shortened_and_never_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[Callable[[int], str]] = []
    monkeypatch.setattr("trencadis.console.progress_line", lambda render: contextlib.nullcontext(lines.append(render)))
    with track(f"Loading /models/{'x' * 200}", unit="buckets", total=9, show=True, clock=SimulatedClock()) as advance:
        advance(3)
        (line,) = (render(79) for render in lines)
    assert len(line) == 79
    assert line.endswith("…: 3/9 buckets · 0 s")
