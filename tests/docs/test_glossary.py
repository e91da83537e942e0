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
PLAIN_PAGES = [page for page in PAGES if not any(page.is_relative_to(path) for path in HISTORY)]
SOURCES = [path for room in ("core", "plugins", "backends") for path in sorted((ROOT / room).rglob("*.py"))]


def banned_words() -> dict[str, str]:
    """Return each ruled-out word with the term to use, from the table of the glossary."""
    banned = {}
    for line in GLOSSARY.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 3 and cells[0] != "term":
            banned |= {word: cells[0] for word in cells[2].split(", ") if word}
    return banned


def retired_words() -> dict[str, str]:
    """Return each word that pages do not use, though code may, with what to say, from the glossary's last table."""
    _, _, last = GLOSSARY.read_text(encoding="utf-8").partition("| not | say |\n|---|---|\n")
    rows = [line.strip("| ").split(" | ") for line in last.splitlines()]
    return {word: say for words, say in rows for word in words.split(", ")}


def vague_words() -> dict[str, str]:
    """Return each word that makes a sentence hard to read, with what to write, from the glossary's table of plain sentences."""
    _, _, rest = GLOSSARY.read_text(encoding="utf-8").partition("| word | write |\n|---|---|\n")
    table, _, _ = rest.partition("\n\n")
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return {word: write for words, write in rows for word in words.split(", ")}


BANNED = banned_words()
RETIRED = retired_words()
VAGUE = vague_words()


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


@pytest.mark.representatives(1000)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_uses_the_words_of_the_glossary(page: Path) -> None:
    assert not found_in(prose(page.read_text(encoding="utf-8")), BANNED | RETIRED)


@pytest.mark.representatives(1000)
@pytest.mark.parametrize("page", PLAIN_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_has_no_word_that_needs_a_second_reading(page: Path) -> None:
    assert not found_in(prose(page.read_text(encoding="utf-8")), VAGUE)


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
    places: dict[str, Path] = {}
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        places |= dict.fromkeys(
            (name for name in public_names(tree) if not name.startswith("_")), path.relative_to(ROOT)
        )
    banned = {words: names for words in map(words_of, places) if (names := found_in(words, BANNED))}
    assert not {name: (place, banned[words_of(name)]) for name, place in places.items() if words_of(name) in banned}


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
