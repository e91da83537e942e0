"""A check, what it finds, and its result. No torch here: the command prints them without."""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable
from typing import Any

import attrs

__all__ = ["Check", "Found", "Result", "Status"]


class Status(enum.Enum):
    """What came out of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@attrs.frozen
class Found:
    """What a check found.

    Attributes:
        holds: Whether the fact holds; None: it cannot be tested here.
        text: In words, with the numbers.
    """

    holds: bool | None
    text: str


@attrs.frozen(kw_only=True)
class Check:
    """A fact that the backend relies on, and how it is tested.

    Attributes:
        name: Unique in the table.
        run: ``module.function`` of this package; takes a bench, returns what it found.
        groups: Processes in which it runs: modes, ``software`` or ``cards``.
        does: How it is tested.
        expects: What is expected.
        means: What it means if the fact does not hold, and what to do.
        is_vital: A fact that does not hold fails the command; else it is doubtful.
    """

    name: str
    run: str
    groups: tuple[str, ...]
    does: str
    expects: str
    means: str
    is_vital: bool = True

    def function(self) -> Callable[[Any], Found]:
        """Import and return the function."""
        module, _, name = self.run.partition(".")
        found: Callable[[Any], Found] = getattr(importlib.import_module(f"trencadis_gaudi.checks.{module}"), name)
        return found

    def result(self, group: str, found: Found, *, seconds: float = 0.0) -> Result:
        """Return the result in a group. Pure."""
        wrong = Status.FAIL if self.is_vital else Status.WARN
        status = Status.SKIP if found.holds is None else Status.OK if found.holds else wrong
        return Result(check=self, group=group, status=status, found=found.text, seconds=seconds)


@attrs.frozen(kw_only=True)
class Result:
    """What a check found in one process.

    Attributes:
        check: The check.
        group: The process.
        status: What came out.
        found: In words.
        seconds: It took.
    """

    check: Check
    group: str
    status: Status
    found: str
    seconds: float

    @property
    def is_wrong(self) -> bool:
        """The fact does not hold."""
        return self.status in {Status.FAIL, Status.WARN}

    def fields(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "group": self.group,
            "name": self.check.name,
            "status": self.status.value,
            "found": self.found,
            "expected": self.check.expects,
            "done": self.check.does,
            "meaning": self.check.means if self.is_wrong else "",
            "seconds": round(self.seconds, 3),
        }
