"""Records of a check, its finding and its result, without torch."""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable
from typing import Any

import attrs

__all__ = ["Check", "Found", "Result", "Status"]


class Status(enum.Enum):
    """Outcome of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@attrs.frozen
class Found:
    """Finding of a check.

    Attributes:
        holds: Whether the fact holds; None: it cannot be tested here.
        text: Finding in words, with numbers.
    """

    holds: bool | None
    text: str


@attrs.frozen(kw_only=True)
class Check:
    """A fact that the backend relies on, and how it is tested.

    Attributes:
        name: Name, unique in the table.
        run: Function as ``module.function`` of this package; it takes a bench and returns a :class:`Found`.
        groups: Groups (processes) in which the check runs: modes, ``software`` or ``cards``.
        does: Description of the test.
        expects: Expected result.
        means: Consequence if the fact does not hold, and what to do.
        is_vital: Whether the command fails if the fact does not hold; else it warns.
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
    """Result of a check in one group.

    Attributes:
        check: Check that ran.
        group: Group (process) in which it ran.
        status: Outcome of the check.
        found: Finding in words.
        seconds: Duration, seconds.
    """

    check: Check
    group: str
    status: Status
    found: str
    seconds: float

    @property
    def is_wrong(self) -> bool:
        """Whether the fact does not hold."""
        return self.status in {Status.FAIL, Status.WARN}

    def fields(self) -> dict[str, Any]:
        """Return the result as fields for JSON."""
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
