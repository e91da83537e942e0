"""Turn the public-domain texts into passages and chats the demo model learns from.

Lives here: the cleaning of each book, the held-out split, the chat format. Does not live here: tokens, batches, models.

    *.txt -> clean -> blocks (one paragraph, speech or stanza) -> first 95 % train | last 5 % held out
                                                                -> passages, chats    -> passages
"""

import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

END = "<|end|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SYSTEM = "<|system|>"
SPECIAL_TOKENS = (END, USER, ASSISTANT, SYSTEM)

HELD_OUT_FRACTION = 0.05
PASSAGE_CHARS = 1500
CHAT_TURN_CHARS = 400
CHAT_TURNS = (2, 2, 4, 6)
SYSTEM_SHARE = 0.25
MILTON_LINES = 40


@dataclass(frozen=True)
class Passage:
    """One stretch of text that ends with the end token.

    `weight` is how many times an epoch shows it on average, 0 .. any; the fraction is drawn afresh each epoch.
    """

    text: str
    weight: float


@dataclass(frozen=True)
class Book:
    """How one file is read and how often its passages are shown in an epoch."""

    clean: Callable[[str], list[str]]
    weight: float = 1.0
    is_play: bool = False


@dataclass
class Corpus:
    """Everything a training run reads; `held_out` never meets the tokenizer or the optimiser."""

    passages: list[Passage] = field(default_factory=list)
    chats: list[Passage] = field(default_factory=list)
    held_out: dict[str, list[str]] = field(default_factory=dict)


def load_corpus(folder: Path, *, seed: int) -> Corpus:
    """Read, clean and split every known text of a folder; unknown `.txt` files are read as prose.

    Args:
        folder: Directory of `.txt` files; `tokenizer_*` files (test strings, no prose) are passed over.
        seed: Seed of the cut of plays into chats.

    Raises:
        FileNotFoundError: The folder holds no text.
    """
    corpus = Corpus()
    rng = random.Random(seed)
    for path in sorted(folder.glob("*.txt")):
        if path.name.startswith("tokenizer_"):
            continue
        book = BOOKS.get(path.name, Book(clean_prose))
        blocks = book.clean(path.read_text(encoding="utf-8", errors="replace").replace("\r", ""))
        kept, held_out = split_held_out(blocks)
        corpus.passages += [Passage(text, book.weight) for text in passages(kept)]
        corpus.held_out[path.stem] = list(passages(held_out))
        if book.is_play:
            corpus.chats += [Passage(text, 1.0) for text in chats(kept, rng)]
    if not corpus.passages:
        raise FileNotFoundError(f"no .txt file with text in {folder}")
    return corpus


def split_held_out(blocks: list[str]) -> tuple[list[str], list[str]]:
    """Return the blocks before and after the point where 95 % of the characters are read."""
    budget = (1.0 - HELD_OUT_FRACTION) * sum(map(len, blocks))
    read = 0
    for index, block in enumerate(blocks):
        read += len(block)
        if read > budget:
            return blocks[:index], blocks[index:]
    return blocks, []


def passages(blocks: Iterable[str]) -> Iterable[str]:
    """Join consecutive blocks until each passage has at least `PASSAGE_CHARS` characters."""
    held: list[str] = []
    for block in blocks:
        held.append(block)
        if sum(map(len, held)) >= PASSAGE_CHARS:
            yield "\n\n".join(held)
            held = []
    if held:
        yield "\n\n".join(held)


def chats(blocks: Iterable[str], rng: random.Random) -> Iterable[str]:
    """Cut a play into chats: one speech is the user's turn, the reply is the assistant's.

    Speeches over `CHAT_TURN_CHARS` characters break a chat, so that replies stay short.
    """
    run: list[tuple[str, str]] = []
    wanted = rng.choice(CHAT_TURNS)
    for block in blocks:
        speaker, _, speech = block.partition(":\n")
        if speech and len(speech) <= CHAT_TURN_CHARS:
            run.append((speaker, speech))
            if len(run) < wanted:
                continue
        if len(run) >= 2:
            yield render_chat(run[: len(run) // 2 * 2], with_system=rng.random() < SYSTEM_SHARE)
        run, wanted = [], rng.choice(CHAT_TURNS)


def render_chat(turns: list[tuple[str, str]], *, with_system: bool) -> str:
    """Write (speaker, speech) pairs as the chat template does, without the last end token."""
    parts = [f"{SYSTEM}You are {turns[1][0].title()}."] if with_system else []
    for index, (_, speech) in enumerate(turns):
        parts.append((ASSISTANT if index % 2 else USER) + speech.strip())
    return END.join(parts)


def clean_prose(text: str, *, verse_indent: int = 8) -> list[str]:
    """Return the paragraphs of hard-wrapped prose, each on one line; deeply indented blocks keep their lines.

    Args:
        text: The book, blank lines between paragraphs.
        verse_indent: Blocks whose every line is indented by at least this many spaces are verse.
    """
    blocks = []
    for raw in re.split(r"\n\s*\n", text):
        lines = [line for line in raw.split("\n") if re.search(r"\w", line)]
        if not lines:
            continue
        is_verse = all(len(line) - len(line.lstrip()) >= verse_indent for line in lines)
        block = "\n".join(line.strip() for line in lines) if is_verse else _unwrap(lines)
        blocks.append(re.sub(r"[ \t]+", " ", block))
    return blocks


def _unwrap(lines: list[str]) -> str:
    """Join the lines of a paragraph; a hyphen at a line's end joins without a space, a bullet starts a line."""
    joined = "\n".join(line.strip() for line in lines)
    joined = re.sub(r"(?<=[\w-]-)\n(?=\w)", "", joined)
    return re.sub(r"\n(?!\* )", " ", joined)


def _clean_alice(text: str) -> list[str]:
    body = _between(text, "CHAPTER I\n", "THE END")
    return clean_prose(body.replace("`", "'"))


def _clean_workshop(text: str) -> list[str]:
    # The directory of participants holds postal addresses and telephone numbers: no prose, and nobody's business.
    body = _between(text, "                              INTRODUCTION\n", "Appendix III:  DIRECTORY OF PARTICIPANTS")
    return clean_prose(body, verse_indent=10**6)


def _clean_milton(text: str) -> list[str]:
    """Return runs of at least 40 lines that end with a sentence; the poem's own paragraphs are pages long."""
    body = _between(text, "\nBook I \n", "[The End]")
    blocks: list[str] = []
    held: list[str] = []
    for line in map(str.strip, body.split("\n")):
        if line and not re.fullmatch(r"Book [IVX]+", line):
            held.append(line)
        if len(held) >= MILTON_LINES and line.endswith("."):
            blocks.append("\n".join(held))
            held = []
    return [*blocks, "\n".join(held)] if held else blocks


def _clean_sonnets(text: str) -> list[str]:
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return ["\n".join(lines[start : start + 14]) for start in range(0, len(lines), 14)]


def _clean_script(text: str) -> list[str]:
    """Return the speeches of a script that is already written `NAME:` over its lines."""
    return [block.strip() for block in re.split(r"\n\s*\n", text) if block.strip()]


def _clean_as_you_like_it(text: str) -> list[str]:
    """Return speeches as `NAME:` over their lines; stage directions, acts and scenes are dropped."""
    body = text[text.rindex("\nACT I\n") :]
    body = re.sub(r"\[[^\]]*\]", "", body)
    body = re.sub(r"(?m)^(ACT|SCENE) .*\n(\t.*\n)*|^\tAS YOU LIKE IT\n", "", body)
    speeches: list[str] = []
    for line in body.split("\n"):
        name, tab, words = line.partition("\t")
        if tab and name.strip():
            speeches.append(f"{name.strip()}:\n{words.strip()}")
        elif words.strip() and speeches:
            speeches[-1] += "\n" + words.strip()
    return speeches


def _between(text: str, start: str, stop: str) -> str:
    """Return what lies between two marks, so that licence text and lists around the book fall away."""
    begin = text.index(start)
    return text[begin:].partition(stop)[0]


# The demo should sound like a story, so the two prose books are shown more often than the verse around them.
BOOKS = {
    "gutenberg_alice29.txt": Book(_clean_alice, weight=4.5),
    "gutenberg_lcet10.txt": Book(_clean_workshop, weight=1.5),
    "gutenberg_plrabn12.txt": Book(_clean_milton, weight=0.7),
    "gutenberg_asyoulik.txt": Book(_clean_as_you_like_it, weight=0.5, is_play=True),
    "shakespeare_sonnets_vllm.txt": Book(_clean_sonnets, weight=1.0),
    "tinyshakespeare.txt": Book(_clean_script, weight=0.5, is_play=True),
}
