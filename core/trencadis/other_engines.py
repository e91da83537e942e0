"""What flags, arguments and commands of vLLM, SGLang, llama.cpp and Ollama are called here, from ``other_engines.toml``.

    --tensor-parallel-size 2 ▶ Counterpart(settings=("parallel.tensor",)) ▶ --parallel.tensor 2

Read only when a name is not known, and to write the documentation.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from trencadis.files import parse_toml

__all__ = [
    "ENGINES",
    "Command",
    "Counterpart",
    "Section",
    "commands",
    "counterparts",
    "listed",
    "parameters",
    "sections",
    "spelt",
]

ENGINES: Mapping[str, str] = {"vllm": "vLLM", "sglang": "SGLang", "llama": "llama.cpp"}
"""Name of each engine by its key in the table."""

_TABLE = Path(__file__).with_suffix(".toml")


@attrs.frozen(kw_only=True)
class Counterpart:
    """One meaning: the flags that other engines have for it, and what it is here.

    Attributes:
        flags: By engine, all spellings.
        settings: Dotted paths of the settings that mean the same; several: of several backends or policies.
        value: The value the setting gets, whatever the flag was given; empty: that of the flag.
        flag: A flag of ``generate``, ``run`` and ``chat`` that means it; empty: none.
        times: Their unit in ours.
        note: In words, code in backticks.
        more: Further text for the documentation, in Markdown; links are paths from ``docs/``.
    """

    flags: Mapping[str, tuple[str, ...]]
    settings: tuple[str, ...] = ()
    value: str = ""
    flag: str = ""
    times: int = 1
    note: str = ""
    more: str = ""

    @property
    def is_same(self) -> bool:
        """Whether it is one setting that takes the same value."""
        return len(self.settings) == 1 and not self.value and self.times == 1

    @property
    def said(self) -> str:
        """``note`` as it is printed, without markup."""
        return self.note.replace("`", "")

    def engines(self, flag: str) -> list[str]:
        """Return the names of the engines that have a flag. Pure."""
        return [ENGINES[engine] for engine, flags in self.flags.items() if flag in flags]

    def scaled(self, value: Any) -> Any:
        """Return the value of their flag in our unit; what is no number stays as it is. Pure."""
        if self.times == 1 or not re.fullmatch(r"\d+(\.\d+)?", str(value)):
            return value
        return int(float(value) * self.times)


@attrs.frozen
class Section:
    """The flags of one subject.

    Attributes:
        title: Title of its table in the documentation.
        rows: Meanings of names.
    """

    title: str
    rows: tuple[Counterpart, ...]


@attrs.frozen(kw_only=True)
class Command:
    """A command of another engine.

    Attributes:
        theirs: Command line that is typed there.
        ours: The command that does it; empty: none.
        note: In words, code in backticks.
    """

    theirs: str
    ours: str = ""
    note: str = ""

    @property
    def said(self) -> str:
        """``note`` as it is printed, without markup."""
        return self.note.replace("`", "")


@functools.cache
def sections() -> tuple[Section, ...]:
    """Return the table of flags. Reads the file once."""
    return tuple(Section(section["title"], tuple(map(_counterpart, section["rows"]))) for section in _read()["section"])


@functools.cache
def commands() -> Mapping[str, Command]:
    """Return commands of other engines by their first word there. Reads the file once."""
    return {
        word: Command(theirs=row["theirs"], ours=row.get("ours", ""), note=row.get("note", ""))
        for row in _read()["command"]
        for word in row["words"].split()
    }


def parameters() -> Mapping[str, str]:
    """Return parameters of sampling, and of beam search, by the names that other engines have for them. Reads the file once."""
    found: Mapping[str, str] = _read()["parameters"]
    return found


def counterparts(name: str) -> list[Counterpart]:
    """Return what a flag or a Python argument of other engines is here; empty: it is none of theirs. Pure.

    Args:
        name: Such as ``--tp``, ``--max_model_len`` or ``tensor_parallel_size``.
    """
    return list(_matches(name))


def _matches(name: str) -> Iterator[Counterpart]:
    flag = spelt(name)
    for section in sections():
        for row in section.rows:
            if row.engines(flag):
                yield row


def listed(names: Sequence[str]) -> str:
    """Return names as a sentence lists them: ``a, b and c``. Pure."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def spelt(name: str) -> str:
    """Return a flag, or a Python argument, as the table spells flags. Pure."""
    if name.startswith("-"):
        return name.replace("_", "-")
    return "--" + name.replace("_", "-")


@functools.cache
def _read() -> Mapping[str, Any]:
    return parse_toml(_TABLE.read_text(encoding="utf-8"))


def _counterpart(row: Mapping[str, Any]) -> Counterpart:
    ours = row.get("ours", ())
    given = {key: value for key, value in row.items() if key not in ENGINES and key != "ours"}
    flags = {engine: tuple(row[engine].split()) for engine in ENGINES if engine in row}
    return Counterpart(flags=flags, settings=(ours,) if isinstance(ours, str) else tuple(ours), **given)
