from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    path for room in ("core", "plugins", "backends", "tools", "benchmarks") for path in (ROOT / room).rglob("*.py")
]
MOST_FUNCTION_LINES = 60


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_fit_a_screen_without_their_docstrings(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert lines <= MOST_FUNCTION_LINES, f"{path.name}:{node.lineno} {node.name} has {lines} lines"


def test_repository_speaks_of_the_software_only() -> None:
    banned = ("co-" + "authored-by", "generated " + "by an ai", "language model " + "wrote")
    for path in [*SOURCES, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = path.read_text().lower()
        assert not any(word in text for word in banned), path
