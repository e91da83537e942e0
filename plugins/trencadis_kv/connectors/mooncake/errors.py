"""What the codes of a Mooncake store mean.

Source: Mooncake, ``mooncake-store/include/types.h``; when 0.3.13 returns which was tried.
"""

from __future__ import annotations

from typing import Final

from trencadis.errors import TransferError
from trencadis.records import TransferCause

__all__ = ["ABSENT", "EXISTS", "FULL", "MISSING", "transfer_error"]

FULL: Final = -200
"""No memory for an object."""
MISSING: Final = -704
EXISTS: Final = -705
ABSENT: Final = frozenset({MISSING, -600, -702, -703, -707, -710, -712, -800})
"""No object, one that is longer than it should be or not whole yet, or one whose holder is gone or slow."""

_MASTER: Final = range(-1099, -899)


def transfer_error(code: int, master: str) -> TransferError:
    """Return what to raise for a code. Pure.

    Args:
        code: Negative.
        master: Address of the master.
    """
    if code in _MASTER:
        return TransferError(
            f"The Mooncake master at {master} does not answer (code {code}).",
            cause=TransferCause.UNREACHABLE,
            hint="Start mooncake_master there, or correct kv_connector.mooncake.master.",
        )
    return TransferError(f"Mooncake returned code {code}.", cause=TransferCause.RAISED)
