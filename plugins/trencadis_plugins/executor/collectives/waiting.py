"""Words in shared memory that processes wait for: they yield for a moment, then sleep in the kernel (futex) until one changes."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Final

import attrs

from trencadis.errors import BackendError

__all__ = ["Futex", "Patience", "available_cores", "fence"]

_FUTEX_WAIT: Final = 0
_FUTEX_WAKE: Final = 1
_ALL_WAITERS: Final = 2**31 - 1
_SYSCALLS: Final = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "loongarch64": 98, "ppc64le": 221, "s390x": 238}
"""Number of ``futex`` on Linux, by what ``uname -m`` says; from the kernel's ``unistd.h`` and ``syscall.tbl``."""

_STORES_STAY_IN_ORDER: Final = platform.machine() in {"x86_64", "s390x"}
"""Processors that neither reorder two stores nor two loads: a stamp that is seen means that what was written before it is, too."""

_SPINS: Final = 200
"""Looks at a word one after the other, about 20 µs."""
_YIELDS: Final = 100
"""Looks with ``sched_yield`` between them, about 50 µs on an idle core."""


class Futex:
    """Waits for and wakes at 32-bit words of a mapped file, across processes.

    Args:
        address: Address of the mapping; words are named by their offset in bytes, a multiple of 4.

    Raises:
        BackendError: This is no Linux, or one whose number of the system call is not known.
    """

    def __init__(self, address: int) -> None:
        number = _SYSCALLS.get(platform.machine()) if platform.system() == "Linux" else None
        if number is None:
            raise BackendError(
                f"Collectives in shared memory need Linux on {', '.join(sorted(_SYSCALLS))}; this is {platform.system()} "
                f"on {platform.machine()}.",
                hint='Use the collectives "gloo".',
            )
        self._address = address
        self._number = number
        # To wake never blocks, so Python's lock is kept; to wait does, and alone has to know errno.
        self._wake = ctypes.PyDLL(None).syscall
        self._wait = ctypes.CDLL(None, use_errno=True).syscall
        self._wake.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_ulong]
        self._wait.argtypes = [*self._wake.argtypes, ctypes.c_void_p]

    def wake(self, offset: int) -> None:
        """Wake whoever sleeps at a word; about a microsecond.

        The kernel has a full memory barrier before it looks for sleepers, and one between registering a sleeper and comparing the
        word (``kernel/futex/futex.h``), so a sleeper either finds the new value or is woken.
        """
        self._wake(self._number, self._address + offset, _FUTEX_WAKE, _ALL_WAITERS)

    def wait(self, offset: int, value: int, timeout_s: float) -> bool:
        """Sleep while a word has a value; may return early. Returns whether it was woken, or had no reason to sleep, before the timeout."""
        seconds = max(0.0, timeout_s)
        limit = (ctypes.c_long * 2)(int(seconds), int(seconds % 1.0 * 1e9))
        failed = self._wait(self._number, self._address + offset, _FUTEX_WAIT, value, ctypes.addressof(limit))
        return not (failed and ctypes.get_errno() == errno.ETIMEDOUT)


def fence() -> Callable[[], None] | None:
    """Return a full memory barrier, to be called between data and stamp; None where the processor needs none.

    Python has no barrier to offer. Where stores may overtake each other (ARM, RISC-V, POWER), a wake-up on a word that no rank waits for is one:
    the kernel's ``futex_wake`` has ``smp_mb()`` on its way.
    """
    if _STORES_STAY_IN_ORDER:
        return None
    word = ctypes.c_uint32(0)
    own = Futex(ctypes.addressof(word))

    def run() -> None:
        own.wake(word.value)

    return run


@attrs.frozen
class Patience:
    """How long a process looks at a word before it sleeps.

    Attributes:
        spins: Looks without giving up the core.
        yields: Looks after each of which others may run.
    """

    spins: int
    yields: int

    @classmethod
    def of(cls, num_processes: int, num_cores: int) -> Patience:
        """Return how long processes that share cores may look: the ranks of a full machine leave its cores to those that compute. Pure."""
        return cls(
            spins=_SPINS if num_cores > num_processes else 0, yields=_YIELDS if num_cores >= num_processes else 2
        )


def available_cores() -> int:
    """Return how many cores this process may use: its affinity and, in a container, its quota (cgroup v2), at least 1."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # none, or "max"
        return cores
