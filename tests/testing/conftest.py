"""Runs a conformance suite on a strategy without pytest, to show that the suite notices a broken one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of broken strategies never end: no use to wait for them."""
    monkeypatch.setattr("trencadis_testing.resources._GRACE_S", 0.05)


@pytest.fixture
def failures_of() -> Callable[..., set[str]]:
    """``failures_of(Suite, make)`` returns the names of the suite's tests that a strategy made by ``make`` fails.

    ``only`` names the one test to run, where whole engines make all of them slow.
    """
    return _failures_of


def _failures_of(suite: type[Any], make: Callable[..., Any], *, only: str = "") -> set[str]:
    candidate = _candidate(suite, make)
    names = [only] if only else [name for name in dir(suite) if name.startswith("test_")]
    return {name for name in names if any(map(_fails, _cases(candidate, name)))}


def _candidate(suite: type[Any], make: Callable[..., Any]) -> type[Any]:
    """Return the suite with a ``make``, as a class that other processes can make, too, if ``make`` has a name in its module."""
    body = {"make": staticmethod(make), "__reduce__": lambda self: (_again, (suite, make), vars(self))}
    return type("TestCandidate", (suite,), body)


def _again(suite: type[Any], make: Callable[..., Any]) -> Any:
    return _candidate(suite, make)()


def _cases(suite: type[Any], name: str) -> Iterator[Callable[[], None]]:
    """Yield one call of the test for each combination of its class's and its own parameters."""
    test = getattr(suite, name)
    marks = [*getattr(suite, "pytestmark", []), *getattr(test, "pytestmark", [])]
    axes = []
    for mark in marks:
        if mark.name == "parametrize":
            names, values = mark.args[0].split(","), list(mark.args[1])
            axes.append([dict(zip(names, value if len(names) > 1 else [value], strict=True)) for value in values])
    for combination in itertools.product(*axes):
        arguments = {key: value for part in combination for key, value in part.items()}
        yield lambda arguments=arguments: test(suite(), **arguments)


def _fails(case: Callable[[], None]) -> bool:
    try:
        case()
    except pytest.skip.Exception:
        return False
    except Exception:  # a broken strategy may break anywhere; to the suite's user each error is a failed test
        return True
    return False
