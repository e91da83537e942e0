"""The fenced blocks of README and docs, and the folder in which the blocks of one page run."""

from __future__ import annotations

import re
import sys
from itertools import zip_longest
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OUTPUT = "output"
_NUMBER = re.compile(r"(?:(?<!\w)[+-])?\d+(?:[,.]\d+)*")
_TIME = re.compile(r"#\s*(?:ns|µs|ms|s|min|h)\b")
_FILE = re.compile(r"# ([\w./-]+\.\w+)\n")


@attrs.frozen
class Block:
    """A fenced block: its page, the line of its fence, its language, what is in it, and what the page says it prints.

    The latter is the text of a block of the language ``output`` that follows with nothing between; empty without one.
    """

    page: str
    line: int
    language: str
    text: str
    output: str = ""

    @property
    def file(self) -> str:
        """The file the block is, if its first line is a comment with no more than a file name; else empty."""
        match = _FILE.match(self.text)
        return match.group(1) if match else ""


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page in their order."""
    return blocks_in(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)))


def blocks_in(text: str, name: str) -> list[Block]:
    """Return the blocks of a text in their order; ``name`` is that of its page. Pure."""
    matches = list(_FENCE.finditer(text))
    return [
        Block(
            name,
            text[: match.start()].count("\n") + 1,
            match.group(1).strip(),
            match.group(2),
            follower.group(2)
            if follower and follower.group(1).strip() == OUTPUT and not text[match.end() : follower.start()].strip()
            else "",
        )
        for match, follower in zip_longest(matches, matches[1:])
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


WALKED = ("docs/plugins/index.md", "The pieces")
"""A page whose commands run in their order in an environment of its own (test_first_plugin.py), and the heading at which they end."""


def is_walked(block: Block) -> bool:
    """Return whether a block is one of the commands of the page that is followed as a whole."""
    page, end = WALKED
    text = (ROOT / page).read_text(encoding="utf-8")
    return (block.page, block.language) == (page, "sh") and block.line < text[: text.index(f"\n## {end}\n")].count("\n")


FIRST_PAGES = {"README.md", "docs/index.md", "docs/learn/quickstart.md", "docs/learn/python.md"}
"""Pages whose blocks every tier runs. A page's blocks stay together: later ones use what earlier ones wrote."""


def parameters(*languages: str, others: pytest.MarkDecorator = pytest.mark.nightly) -> list[pytest.param]:
    """Return the blocks of some languages as parameters of a test, each with its page and line as id.

    A block that stands on several pages is there once, unless it names a file of its page or shows another output. Those that are not
    on `FIRST_PAGES` are marked as ``others`` says.
    """
    chosen: dict[tuple[str, str, str], Block] = {}
    for block in sorted(BLOCKS, key=lambda block: block.page not in FIRST_PAGES):
        if block.language in set(languages) and not is_walked(block):
            files = [other.file for other in BLOCKS if other.page == block.page and other.file]
            place = block.page if any(file in block.text for file in files) else ""
            chosen.setdefault((place, block.text, block.output), block)
    return [
        pytest.param(block, id=f"{block.page}:{block.line}", marks=() if block.page in FIRST_PAGES else others)
        for block in chosen.values()
    ]


def stable(text: str) -> str:
    """Return what a text keeps from run to run: no numbers, no units of times, no widths of columns. Pure."""
    lines = [_TIME.sub("# s", _NUMBER.sub("#", line)) for line in text.strip().splitlines()]
    return "\n".join(" ".join(re.sub(r"-{2,}", "-", line).split()) for line in lines)


def shows(output: str, printed: str) -> bool:
    """Return whether a page's output is what was printed. Pure.

    Numbers and widths may differ. ``…`` stands for anything within a line, and for any lines where it is one by itself.
    """
    lines = [
        r"(?:[^\n]*\n)*?" if line == "…" else r"[^\n]*?".join(map(re.escape, line.split("…"))) + r"\n"
        for line in stable(output).splitlines()
    ]
    return re.fullmatch("".join(lines), f"{stable(printed)}\n") is not None


def write_files(page: str, folder: Path) -> None:
    """Write the blocks of a page that are files, and link the examples of the repository."""
    (folder / "examples").symlink_to(ROOT / "examples")
    for block in BLOCKS:
        if block.page == page and block.file:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")


STAND_INS = {
    # What would change this machine, or is tested as a whole elsewhere (tests/packaging), does nothing.
    "pip": "exit 0",
    "pytest": "exit 0",
    "kill": "exit 0",
    "trencadis": f'exec {sys.executable} -I -S -c "$CLIENT" "$FORKS_AT" "$@"',
    "python": f'exec {sys.executable} "$@"',
    "curl": 'exec "$REAL_CURL" --fail-with-body --silent --show-error "$@"',
}
"""What stands for a command when a block runs: the body of a shell script."""
