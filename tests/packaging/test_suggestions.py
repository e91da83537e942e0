"""In an error the suggestion comes before the list of choices: a list may be longer than the screen."""

from __future__ import annotations

import ast
from pathlib import Path

from trencadis.errors import closest, must_be_one_of

ROOT = Path(__file__).parents[2]


def _lists_before_suggestion(text: ast.JoinedStr) -> bool:
    """Return whether an f-string joins choices, and suggests one of them after that."""
    calls = [
        call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        for part in text.values
        for call in ast.walk(part)
        if isinstance(call, ast.Call)
    ]
    return "did_you_mean" in calls and "join" in calls[: calls.index("did_you_mean")]


def test_no_message_lists_choices_before_it_suggests_one() -> None:
    files = [file for room in ("core", "plugins", "backends") for file in (ROOT / room).rglob("*.py")]
    assert len(files) > 500
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in files
        if "did_you_mean" in (source := file.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.JoinedStr) and _lists_before_suggestion(node)
    ]
    assert wrong == []


def test_a_close_choice_is_suggested_first_and_two_letters_in_the_other_order_are_the_likeliest_slip() -> None:
    assert must_be_one_of("inof", ["debug", "info"]) == 'did you mean "info"? It must be one of: debug, info.'
    assert must_be_one_of("xyz", ["debug", "info"]) == "must be one of: debug, info."
    for word, meant in {"--modle": "--model", "--mode": "--mode", "--modal": "--model", "--xyz": ""}.items():
        assert closest(word, ["--mode", "--model"]) == meant
