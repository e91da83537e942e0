"""Health checks: what ``trencadis doctor`` asks a plugin about this machine and configuration."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any

import attrs

__all__ = ["Finding", "HealthCheck", "Severity"]


class Severity(enum.Enum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@attrs.frozen
class Finding:
    """One thing that was looked at.

    Attributes:
        severity: Whether it is right, doubtful or wrong.
        message: Text of the finding, with the value.
        remedy: How to mend it; empty if nothing is wrong.
    """

    severity: Severity
    message: str
    remedy: str = ""

    @classmethod
    def ok(cls, message: str) -> Finding:
        """Return a finding that something is right. Pure."""
        return cls(Severity.OK, message)

    @classmethod
    def warn(cls, message: str, remedy: str) -> Finding:
        """Return a finding that something is doubtful. Pure."""
        return cls(Severity.WARN, message, remedy)

    @classmethod
    def fail(cls, message: str, remedy: str) -> Finding:
        """Return a finding that something is wrong. Pure."""
        return cls(Severity.FAIL, message, remedy)


@attrs.frozen(kw_only=True)
class HealthCheck:
    """A section of ``trencadis doctor``.

    Attributes:
        name: Name of the section, lower-case; such as ``server``.
        run: Called with the ``trencadis.config.Config`` that the valid values make; returns findings in the order in which they
            are printed. An error that it raises is printed as a finding. It changes nothing on the machine.
    """

    name: str
    run: Callable[[Any], Iterable[Finding]]
