from __future__ import annotations

import io

from trencadis.cli.tables import print_table

HEADINGS = ("name", "meaning")
ROWS = [("a", "first [red] one"), ("longer", "")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_table_in_a_file_is_plain_and_aligned():
    out = io.StringIO()
    print_table(HEADINGS, ROWS, stream=out)
    assert out.getvalue().splitlines() == ["name    meaning", "a       first [red] one", "longer"]


def test_a_table_on_a_terminal_shows_brackets_as_they_are():
    out = Terminal()
    print_table(HEADINGS, ROWS, stream=out)
    assert "first [red] one" in out.getvalue()
    assert "longer" in out.getvalue()


def test_a_table_goes_to_standard_output_by_default(capsys):
    print_table(HEADINGS, [])
    assert capsys.readouterr().out == "name  meaning\n"
