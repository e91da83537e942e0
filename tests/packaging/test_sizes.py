from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    path for room in ("core", "plugins", "backends", "tools", "benchmarks") for path in (ROOT / room).rglob("*.py")
]
MOST_FUNCTION_LINES = 60


def functions_of(path: Path) -> Iterator[tuple[str, int]]:
    """Yield where each function of a module is, and its lines without its docstring."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", lines


@pytest.mark.slow
def test_functions_fit_a_screen_without_their_docstrings() -> None:
    long = {name: lines for path in SOURCES for name, lines in functions_of(path) if lines > MOST_FUNCTION_LINES}
    assert long == {}


def test_repository_speaks_of_the_software_only() -> None:
    banned = ("co-" + "authored-by", "generated " + "by an ai", "language model " + "wrote")
    for path in [*SOURCES, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = path.read_text().lower()
        assert not any(word in text for word in banned), path
