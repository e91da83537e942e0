"""Broken components, and the proof that a conformance suite notices each of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

__all__ = ["broken", "leaves_a_thread", "proofs"]


def broken(name: str, base: type[Any], **members: Any) -> type[Any]:
    """Return a component with other members: one fault, after which it is named."""
    return type(name, (base,), members)


def leaves_a_thread(base: type[Any]) -> type[Any]:
    """Return a component that starts a thread which nobody ends."""

    class LeavesAThread(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            threading.Thread(target=threading.Event().wait, name="left behind", daemon=True).start()

    return LeavesAThread


def proofs(
    suite: type[Any],
    mutants: Mapping[str, Sequence[type[Any]]],
    *,
    make: Callable[[Any], Any] = lambda mutant: mutant,
    patches: Mapping[str, float] = {},
) -> tuple[Callable[..., None], Callable[[], None]]:
    """Return two tests: that every mutant dies in the test of the suite which is its law, and that each law has one.

    Args:
        suite: The conformance suite.
        mutants: Broken components by the law that they break, the name of a test of the suite.
        make: Makes of a mutant what the suite's ``make`` is.
        patches: Attributes and their values while a mutant runs, such as times that a correct one needs.
    """
    cases = [pytest.param(law, mutant, id=mutant.__name__) for law, ones in mutants.items() for mutant in ones]

    @pytest.mark.parametrize(("law", "mutant"), cases)
    def fails(
        failures_of: Callable[..., set[str]], monkeypatch: pytest.MonkeyPatch, law: str, mutant: type[Any]
    ) -> None:
        for attribute, value in patches.items():
            monkeypatch.setattr(attribute, value)
        assert failures_of(suite, make(mutant), only=law)

    def every_law() -> None:
        assert {name for name in dir(suite) if name.startswith("test_")} == set(mutants)

    return fails, every_law
