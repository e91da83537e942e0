"""Which process a rank is, so that the others can tell whether it still runs."""

from __future__ import annotations

import os
from pathlib import Path

import attrs

__all__ = ["ProcessId", "this_process"]


@attrs.frozen
class ProcessId:
    """A process, told from a later one of the same number.

    Attributes:
        number: Number of the process; 0: none.
        start: When it started, in clock ticks since the machine did.
        namespace: In which ``number`` counts.
    """

    number: int
    start: int
    namespace: int

    def state(self) -> str:
        """Return ``runs``, ``stopped`` or ``ended``; ``runs`` as well where this process cannot see it."""
        if self.namespace != _namespace():
            return "runs"
        found = _stat(self.number)
        if found is None or found[0] in "ZXx" or found[1] != self.start:
            return "ended"
        return "stopped" if found[0] in "Tt" else "runs"


def this_process() -> ProcessId:
    """Return this process."""
    found = _stat(os.getpid())
    return ProcessId(os.getpid(), 0 if found is None else found[1], _namespace())


def _namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _stat(number: int) -> tuple[str, int] | None:
    """Return state and start of a process, fields 3 and 22 of ``proc(5)``; None: there is none."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])
