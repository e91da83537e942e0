"""Findings of an examination."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import attrs

from trencadis.errors import TrencadisError
from trencadis.interfaces import Finding, Severity

__all__ = ["Findings", "SectionFinding"]

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class SectionFinding(Finding):
    """A finding with its section.

    Attributes:
        section: Section of the examination, such as ``plugins``.
    """

    section: str


class Findings:
    """Findings in the order of the checks, by section."""

    def __init__(self) -> None:
        self._items: list[SectionFinding] = []
        self._section = ""

    def __iter__(self) -> Iterator[SectionFinding]:
        return iter(self._items)

    def count(self, severity: Severity) -> int:
        """Return how many findings are of a severity. Pure."""
        return sum(item.severity is severity for item in self._items)

    def ok(self, message: str) -> None:
        """Add a finding without a problem."""
        self._add(Severity.OK, message, "")

    def warn(self, message: str, remedy: str) -> None:
        """Add a warning with its remedy."""
        self._add(Severity.WARN, message, remedy)

    def fail(self, message: str, remedy: str) -> None:
        """Add a failure with its remedy."""
        self._add(Severity.FAIL, message, remedy)

    def warn_with(self, error: TrencadisError) -> None:
        """Add an error of Trencadís as a warning, with the remedy of :meth:`fail_with`."""
        self._add(Severity.WARN, *_parts_of(error))

    def fail_with(self, error: TrencadisError) -> None:
        """Add an error of Trencadís as a failure; the remedy is its hint, else the sentence after ``Fix:`` in its class's docstring."""
        self._add(Severity.FAIL, *_parts_of(error))

    def add(self, findings: Iterable[Finding]) -> None:
        """Add the findings of a plugin's check."""
        for item in findings:
            self._add(item.severity, item.message, item.remedy)

    def run(self, section: str, check: Callable[..., T], *arguments: Any, otherwise: T | None = None) -> T | None:
        """Run one check; any exception becomes a finding.

        Args:
            section: Section of the check's findings.
            check: Function, called with this object and the arguments.
            arguments: Further arguments of the check.
            otherwise: Result if the check raises.
        """
        before, self._section = self._section, section
        try:
            return check(self, *arguments)
        except TrencadisError as error:
            self.fail_with(error)
        except (Exception, SystemExit) as error:
            self.fail(
                f"the check of this section raised {type(error).__name__}: {error}",
                "Mend what the message names; if it names nothing of yours, report it.",
            )
        finally:
            self._section = before
        return otherwise

    def _add(self, severity: Severity, message: str, remedy: str) -> None:
        one_line = " ".join(message.split())
        self._items.append(
            SectionFinding(section=self._section, severity=severity, message=one_line, remedy=" ".join(remedy.split()))
        )


def _parts_of(error: TrencadisError) -> tuple[str, str]:
    return str(error).removesuffix(error.hint).strip(), error.hint or _remedy_of(type(error))


def _remedy_of(kind: type[TrencadisError]) -> str:
    """Return the sentence after ``Fix:`` in the docstring of an error's class."""
    _, _, fix = (inspect.getdoc(kind) or "").partition("Fix: ")
    sentence = " ".join(fix.split())
    return sentence[:1].upper() + sentence[1:] or "Correct what the message names."
