"""The words of the glossary are used, in the pages and in public names; those it rules out are not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs/why/glossary.md"
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page != GLOSSARY)]
HISTORY = (ROOT / "docs/decisions", ROOT / "docs/why/changelog.md")
SOURCES = [path for room in ("core", "plugins", "backends") for path in sorted((ROOT / room).rglob("*.py"))]


def rows(after: str) -> list[list[str]]:
    """Return the cells of the glossary's table that begins with some lines."""
    table = GLOSSARY.read_text(encoding="utf-8").partition(after)[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


# Each ruled-out word with the term to use; words that pages do not use, though code may; words that make a sentence hard to read.
BANNED = {word: term for term, _, words in rows("|---|---|---|\n") for word in words.split(", ") if word}
RETIRED = {word: say for words, say in rows("| not | say |\n|---|---|\n") for word in words.split(", ")}
VAGUE = {word: write for words, write in rows("| word | write |\n|---|---|\n") for word in words.split(", ")}


def prose(text: str) -> str:
    """Return a page without fenced blocks, code spans, HTML comments, addresses and laws of science. Pure."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`]*`|<!--.*?-->|\]\([^)]*\)|(?:\w+'s|[Pp]ower)[ -]law\b", " ", text, flags=re.DOTALL)


def found_in(text: str, words: dict[str, str]) -> list[str]:
    """Return the ruled-out words of a text, singular or plural, spread over lines or not. Pure."""
    return [
        f'"{word}": say {term}'
        for word, term in words.items()
        if re.search(rf"\b{re.escape(word)}s?\b".replace(r"\ ", r"[\s-]+"), text, re.IGNORECASE)
    ]


def test_pages_use_the_words_of_the_glossary_and_none_that_needs_a_second_reading() -> None:
    for page in PAGES:
        words = BANNED | RETIRED | ({} if any(page.is_relative_to(path) for path in HISTORY) else VAGUE)
        assert not found_in(prose(page.read_text(encoding="utf-8")), words), page


def public_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module offers: classes, functions, their parameters, and annotated fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
            if not node.name.startswith("_"):
                yield from (arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def words_of(name: str) -> str:
    """Return a name's words in lower case with spaces between. Pure."""
    return re.sub(r"_|(?<=[a-z0-9])(?=[A-Z])", " ", name).lower()


@pytest.mark.slow
def test_public_names_use_the_words_of_the_glossary() -> None:
    names = {name for path in SOURCES for name in public_names(ast.parse(path.read_text(encoding="utf-8")))}
    assert len(names) > 1000
    assert not found_in(" | ".join(words_of(name) for name in sorted(names) if not name.startswith("_")), BANNED)


def test_the_glossary_rules_words_out() -> None:
    assert BANNED["iteration"].startswith("step")
    assert BANNED["job"].startswith("request")
    assert len(BANNED) > 20
    assert RETIRED["errand"] == "background call"
    assert RETIRED["landing"] == RETIRED["lane"]
    assert VAGUE["but for"].startswith("except")
    assert len(VAGUE) == 12


def test_a_ruled_out_word_would_be_found() -> None:
    assert found_in(prose("One iteration\nfor each `job`."), BANNED) == ['"iteration": say step']
    assert found_in(prose("Two page\ntables."), BANNED)
    assert found_in(prose("All tokens are equal, but\nfor near ties."), VAGUE) == ['"but for": say except, without']
    assert not found_in(prose("| `everybody may write to it` | choose |"), VAGUE)
    assert not found_in(prose("```python\njob = 1\n```\n"), BANNED)
    assert found_in(prose("The law of a token."), BANNED) == ['"law of a token": say distribution']
    assert not found_in(prose("Little's law, and a power law."), BANNED)
    assert found_in(words_of("num_iterations"), BANNED)
    assert found_in(words_of("JobQueue"), BANNED)
