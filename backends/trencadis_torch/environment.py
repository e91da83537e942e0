"""How threads wait for each other, set once before torch is imported: its OpenMP library reads it then."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping

__all__ = ["set_environment"]

logger = logging.getLogger("trencadis.torch")

POLICY, SPINS = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"

NUM_SPINS = 500
"""Pauses before a thread that waits goes to sleep, 13 µs on the CPU it was measured on: as long as neighbouring threads wait for each
other in one operation, and less than a sleep and a wake-up cost where cores are shared."""


def set_environment(environ: MutableMapping[str, str], modules: Mapping[str, object]) -> None:
    """Let threads spin for a moment and then sleep while they wait, unless they were set otherwise.

    A thread that spins for long takes the core from the one it waits for, where cores are shared: a decode step on two threads
    took ten times as long. Where they are not, sleeping at once costs a wake-up for each operation: two threads were slower than
    one.

    Args:
        environ: Changed.
        modules: Those imported so far: once torch is, nothing can be changed any more.

    Source: libgomp's manual, OMP_WAIT_POLICY and GOMP_SPINCOUNT.
    """
    if POLICY in environ or SPINS in environ:
        return
    if "torch" in modules:
        logger.debug("torch is imported already: its threads spin while they wait; %s=passive lets them sleep.", POLICY)
        return
    environ[POLICY] = "passive"
    environ[SPINS] = str(NUM_SPINS)
