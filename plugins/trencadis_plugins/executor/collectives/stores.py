"""Where ranks of torch.distributed find each other: a file of this user's alone, or a port of the owner."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import attrs

from trencadis_plugins.executor.collectives.group_memory import RankProgress
from trencadis_plugins.executor.collectives.owner import GroupAddress, GroupOwner, require_members

__all__ = ["StoreOwner", "remove_leftovers"]

_PREFIX = "trencadis-ranks-"
_LOCK = "owner"


class StoreOwner(GroupOwner):
    """Owner of a store, and of no group: of what ranks do it sees nothing, and whom it wants to end it kills.

    Args:
        address: Address of the world, without a name.
        host: By which ranks on other machines reach the owner, which listens on a free port of all its interfaces; empty: all ranks
            are here and meet at a file in a directory of mode 0700.
    """

    def __init__(self, address: GroupAddress, *, host: str = "") -> None:
        self.size = address.size
        self._folder: Path | None = None
        self._store: Any = None
        if host:
            import torch.distributed

            stores: Any = torch.distributed
            self._store = stores.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            name = f"tcp://{host}:{self._store.port}"
        else:
            remove_leftovers()
            self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
            self._lock = _locked(self._folder)
            name = f"file://{self._folder / 'store'}"
        self._address = attrs.evolve(address, name=name)

    def address(self, rank: int) -> GroupAddress:
        """Return the address of a rank of the world."""
        return attrs.evolve(self._address, rank=rank)

    def subgroup(self, members: tuple[int, ...]) -> GroupOwner:
        """Return a group that meets at the same store; a rank opens the world first."""
        require_members(members, self.size)
        return _Subgroup(attrs.evolve(self._address, size=len(members), members=members))

    def progress(self) -> tuple[RankProgress, ...]:
        """Return nothing."""
        return ()

    def abort(self, reason: str = "") -> None:
        """Do nothing: an owner cannot reach the ranks. It kills one, and the others' calls raise."""

    def opened(self) -> None:
        """Do nothing: ranks use the store again to say which of them a call failed on, and NCCL at its first call."""

    def unlink(self) -> None:
        """Close the port, or remove the file; needed until all ranks and their subgroups are open."""
        self._store = None
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(self._lock)


def remove_leftovers() -> None:
    """Remove the folders of owners that have ended; the kernel gives a lock up with its process."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _locked(folder: Path) -> int:
    """Lock a folder for as long as the returned descriptor is open; nobody finds the lock before it is taken."""
    descriptor = os.open(folder / "new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    (folder / "new").rename(folder / _LOCK)
    return descriptor


class _Subgroup(GroupOwner):
    def __init__(self, address: GroupAddress) -> None:
        self.size = address.size
        self._address = address

    def address(self, rank: int) -> GroupAddress:
        # Of one rank there is nothing to meet.
        return attrs.evolve(self._address, rank=rank, name=self._address.name if self.size > 1 else "")

    def subgroup(self, members: tuple[int, ...]) -> GroupOwner:
        require_members(members, self.size)
        chosen = tuple(self._address.members[member] for member in members)
        return _Subgroup(attrs.evolve(self._address, size=len(members), members=chosen))

    def progress(self) -> tuple[RankProgress, ...]:
        return ()

    def abort(self, reason: str = "") -> None:
        """Do nothing, as the world."""

    def opened(self) -> None:
        """Do nothing."""

    def unlink(self) -> None:
        """Do nothing: the store is the world's."""
