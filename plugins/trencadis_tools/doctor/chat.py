"""Checks of the chat template and of end-of-turn tokens, from a model's files, its tokenizer, and a trial of the template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trencadis.api import Tokenizer, chat_template_of, ends_of_turn
from trencadis_tools.doctor.findings import Findings

__all__ = ["check_ends", "check_template"]


def check_template(found: Findings, tokenizer: Tokenizer) -> None:
    """Check the chat template, if there is one, and report the form of messages that it takes.

    Args:
        found: Findings to add to.
        tokenizer: Tokenizer of the model.

    Raises:
        InvalidRequestError: The template takes too much time or memory.
    """
    source = tokenizer.find_template()
    if source and not tokenizer.writes_chats:
        forms = chat_template_of(source, tokenizer.special_tokens).forms()
        found.ok(f"chat template: {_words(forms)}")


def check_ends(found: Findings, tokenizer: Tokenizer, files: Path | None) -> None:
    """List the tokens that end a turn, with the files that name them.

    Args:
        found: Findings to add to.
        tokenizer: Tokenizer that has texts.
        files: Directory with ``config.json``; None: there is none.
    """
    ends = ends_of_turn(tokenizer, _named(files), always_tries=True)
    if ends:
        told = [f"{_shown(tokenizer, end)} ({', '.join(sources)})" for end, sources in ends.items()]
        found.ok(f"ends of a turn: {'; '.join(told)}")
    else:
        found.warn(
            "ends of a turn: none; every text runs on to max_tokens",
            "Set eos_token_id in generation_config.json, or eos_token in tokenizer_config.json.",
        )


def _words(forms: Mapping[str, str]) -> str:
    """Return the form of the content of each role, in words. Pure."""
    by_form: dict[str, list[str]] = {}
    for role, form in forms.items():
        by_form.setdefault(form, []).append(role)
    if len(by_form) == 1:
        return f"content as {next(iter(by_form))}"
    return "; ".join(f"content of {', '.join(roles)} as {form}" for form, roles in by_form.items())


def _shown(tokenizer: Tokenizer, token_id: int) -> str:
    text = tokenizer.decode([token_id]) if tokenizer.knows(token_id) else "no token of the tokenizer"
    return f"{token_id} {text}"


def _named(files: Path | None) -> dict[str, tuple[int, ...]]:
    """Return the end-of-sequence tokens named by a model's files; unreadable files are left to another check."""
    found: dict[str, tuple[int, ...]] = {}
    for name in ("generation_config.json", "config.json"):
        try:
            told = json.loads((files / name).read_text(encoding="utf-8")) if files is not None else {}
        except (OSError, ValueError):
            continue
        inner = told.get("text_config") if isinstance(told, Mapping) else None
        found[name] = tuple(dict.fromkeys(end for part in (told, inner) for end in _ids(part)))
    return found


def _ids(table: Any) -> Iterable[int]:
    eos = table.get("eos_token_id") if isinstance(table, Mapping) else None
    return [one for one in (eos if isinstance(eos, list) else [eos]) if isinstance(one, int)]
