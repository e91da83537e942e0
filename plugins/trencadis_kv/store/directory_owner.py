"""Checks of a store's directory: permissions, ownership of files, and readable errors."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

from trencadis.errors import TransferError
from trencadis.records import TransferCause

__all__ = ["DirectoryOwner"]

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_REFUSED: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_REMEDY: Final = "Name a directory of this user's own; or set trust_others, if every user who can write there may decide what is generated."


class DirectoryOwner:
    """One directory and the user of this process. From any thread.

    Args:
        root: Path of the directory.
        trust_others: Whether the directory, and files in it, may belong to other users.
    """

    def __init__(self, root: Path, *, trust_others: bool) -> None:
        self._root = root
        self._trust_others = trust_others
        self._device: int | None = None

    def check(self) -> None:
        """Create the directory if it is missing.

        Raises:
            TransferError: ``unreachable``: the directory cannot be used, or must not be; the message says why.
        """
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = self._root.stat()
            if not os.access(self._root, os.R_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self._root))
        except OSError as error:
            raise self.in_words(error) from error
        if not self._trust_others:
            self._refuse_unsafe(facts)
        if self._device is None:
            self._device = facts.st_dev
        elif self._device != facts.st_dev:
            # Files written to a mount point while nothing is mounted there fill the wrong disk.
            raise self.unusable("it lies on another device than before", "Mount its file system again.")

    def owns(self, facts: os.stat_result) -> bool:
        """Return whether a file may be used: a regular one, of this user unless others are trusted. Pure."""
        return stat.S_ISREG(facts.st_mode) and (self._trust_others or facts.st_uid == os.geteuid())

    def unusable(self, why: str, remedy: str) -> TransferError:
        """Return the error, with cause ``unreachable``. Pure."""
        message = f"The KV directory {self._root} cannot be used: {why}."
        return TransferError(message, cause=TransferCause.UNREACHABLE, hint=remedy)

    def in_words(self, error: OSError) -> TransferError:
        """Return a file-system error as a transfer error, ``full`` or ``unreachable``, with a hint. Pure."""
        what = f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, 'no number')})"
        if error.errno in _FULL:
            hint = "Free space or raise the quota; until then nothing is saved."
            return TransferError(f"The KV directory {self._root} is full: {what}.", cause=TransferCause.FULL, hint=hint)
        if error.errno in _REFUSED:
            return self.unusable(what, f"User {os.geteuid()} must be able to read and write there.")
        return self.unusable(what, "Check its path and its file system.")

    def _refuse_unsafe(self, facts: os.stat_result) -> None:
        if facts.st_uid != os.geteuid():
            raise self.unusable(f"it belongs to user {facts.st_uid}, not to {os.geteuid()}", _REMEDY)
        if facts.st_mode & stat.S_IWOTH:
            raise self.unusable(f"every user may write to it (mode {stat.S_IMODE(facts.st_mode):04o})", _REMEDY)
