"""The file in shared memory that a group's ranks map: where its words and buffers are, who may delete it, what was left over.

    group    magic, sizes, abort word
    rank     stamps, two headers, progress, process, reason     for each rank, and for the owner
    mailbox  head, tail, descriptors                            for each ordered pair of ranks
    slots    two for each rank, several for each mailbox

The owner makes the file without a name (``O_TMPFILE``), locks it, and links it under its name when it is complete: a rank never opens an
incomplete file, and a file without a lock has lost its owner, even if another process has the owner's process id by now.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import struct
from pathlib import Path
from typing import Final

import attrs

from trencadis.errors import BackendError, CollectiveError

__all__ = [
    "ABORT",
    "DIRECTORY",
    "ENDED",
    "FIRST_STAMP",
    "MAILBOX_SLOTS",
    "REASON_BYTES",
    "Layout",
    "Segment",
    "remove_leftovers",
]

DIRECTORY: Final = Path("/dev/shm")
_NAME = re.compile(r"trencadis-\d+-\d+-\w[\w.-]*")
_HEAD = struct.Struct("<8sIIQQ")
_MAGIC: Final = b"trnc-co1"
_LINE: Final = 64
"""Bytes of a cache line, a multiple of which keeps the words of two writers apart."""

ABORT: Final = _LINE
"""Offset of the abort word: 0, or 1 + the rank that ended the group; u32."""
REASON_BYTES: Final = 500
"""Longest reason of a rank to abort."""
MAILBOX_SLOTS: Final = 4
"""Slots of a mailbox."""
_RANK_BYTES: Final = 1024
_BOX_BYTES: Final = 256

FIRST_STAMP: Final = 2**31 - 100
"""Stamps count modulo 2^31, and begin shortly before they start again: every group passes the place where a mistake would show."""
ENDED: Final = 2**31
"""Value of all stamps once a group was aborted; no stamp has it otherwise."""


_MOST_SLOT_BYTES: Final = 2**20
_SLOTS_BYTES: Final = 8 * 2**20
_MOST_MAILBOX_SLOT_BYTES: Final = 64 * 1024
_MAILBOXES_BYTES: Final = 16 * 2**20
"""Size for all ranks together: containers have 64 MiB of shared memory, if nothing else was said, and a replica has several groups."""


@attrs.frozen
class Layout:
    """Where things are in a segment, in bytes from its beginning.

    Attributes:
        size: Ranks.
        slot_bytes: Size of each of a rank's two slots for collectives, a multiple of 4096.
        mailbox_slot_bytes: Size of each slot of a mailbox, a multiple of 4096.
    """

    size: int
    slot_bytes: int
    mailbox_slot_bytes: int

    @classmethod
    def of(cls, size: int) -> Layout:
        """Return the layout of a group: slots of 1 MiB for up to four ranks, and no more than 24 MiB and the words for any number.

        Sums of 1 and 8 MiB between two ranks took a tenth to a quarter less CPU time with slots of 1 MiB than with 512 KiB, and half
        of that with 128 KiB. Pure.
        """
        slots = min(_MOST_SLOT_BYTES, _SLOTS_BYTES // (2 * size))
        mailbox_slots = min(_MOST_MAILBOX_SLOT_BYTES, _MAILBOXES_BYTES // (MAILBOX_SLOTS * size * max(1, size - 1)))
        return cls(size, _whole_pages(slots), _whole_pages(mailbox_slots))

    def arrived(self, rank: int) -> int:
        """Return the stamp of the latest chunk that a rank put into its slot; u32."""
        return 2 * _LINE + rank * _RANK_BYTES

    def summed(self, rank: int) -> int:
        """Return the stamp of the latest chunk of which a rank has summed its slice; u32."""
        return self.arrived(rank) + _LINE

    def header(self, rank: int, parity: int) -> int:
        """Return what a rank called, for chunks of a parity; two u64."""
        return self.arrived(rank) + 2 * _LINE + 16 * parity

    def progress(self, rank: int) -> int:
        """Return number and kind of a rank's latest call, and its bytes; two u64."""
        return self.arrived(rank) + 3 * _LINE

    def process(self, rank: int) -> int:
        """Return process, its start, its PID namespace, and whether it closed the group; four u64."""
        return self.arrived(rank) + 4 * _LINE

    def reason(self, rank: int) -> int:
        """Return length (u32) and text of a rank's reason to abort; that of rank ``size`` is the owner's."""
        return self.arrived(rank) + 8 * _LINE

    def head(self, source: int, target: int) -> int:
        """Return the stamp of the latest chunk that was put into a mailbox; u32."""
        place = source * (self.size - 1) + target - (target > source)
        return self.arrived(self.size + 1) + place * _BOX_BYTES

    def tail(self, source: int, target: int) -> int:
        """Return the stamp of the latest chunk that was taken out of a mailbox; u32."""
        return self.head(source, target) + _LINE

    def message_header(self, source: int, target: int, stamp: int) -> int:
        """Return what the chunk in a mailbox's slot is of; two u64."""
        return self.head(source, target) + 2 * _LINE + 16 * (stamp % MAILBOX_SLOTS)

    def slot(self, rank: int, parity: int) -> int:
        """Return a rank's slot."""
        return self._slots + (2 * rank + parity) * self.slot_bytes

    def mailbox_slot(self, source: int, target: int, stamp: int) -> int:
        """Return a slot of a mailbox."""
        place = source * (self.size - 1) + target - (target > source)
        first = self._slots + 2 * self.size * self.slot_bytes
        return first + (place * MAILBOX_SLOTS + stamp % MAILBOX_SLOTS) * self.mailbox_slot_bytes

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self.mailbox_slot(self.size, 1, 0) if self.size > 1 else self._slots + 2 * self.slot_bytes

    @property
    def stamps(self) -> tuple[int, ...]:
        """Every word that a rank may wait for."""
        ranks = range(self.size)
        boxes = [(source, target) for source in ranks for target in ranks if source != target]
        return (
            *(place(rank) for rank in ranks for place in (self.arrived, self.summed)),
            *(place(*box) for box in boxes for place in (self.head, self.tail)),
        )

    @property
    def _slots(self) -> int:
        words = self.arrived(self.size + 1) + self.size * (self.size - 1) * _BOX_BYTES
        return -(-words // 4096) * 4096


class Segment:
    """A mapped segment; memory goes when nothing refers to the mapping any more.

    Attributes:
        layout: Where things are.
        mapping: The bytes.
    """

    def __init__(self, layout: Layout, mapping: mmap.mmap, descriptor: int = -1, path: Path | None = None) -> None:
        self.layout = layout
        self.mapping = mapping
        self._descriptor = descriptor
        self._path = path

    @classmethod
    def create(cls, name: str, layout: Layout, *, directory: Path = DIRECTORY) -> Segment:
        """Make a segment, locked by this process until :meth:`unlink`; memory is taken at once.

        Raises:
            BackendError: There is one of that name, or no room.
        """
        assert _NAME.fullmatch(name), name
        descriptor = -1
        try:
            descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Not a hole, which would be a bus error when it is written to and there is no room.
            os.posix_fallocate(descriptor, 0, layout.num_bytes)
            mapping = mmap.mmap(descriptor, layout.num_bytes)
            _HEAD.pack_into(mapping, 0, _MAGIC, layout.size, 0, layout.slot_bytes, layout.mailbox_slot_bytes)
            words = memoryview(mapping).cast("I")
            for place in layout.stamps:
                words[place // 4] = FIRST_STAMP
            words.release()
            _link(descriptor, directory / name)
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            mib = layout.num_bytes / 2**20
            raise BackendError(
                f"{directory / name}, shared memory of {layout.size} ranks, {mib:.1f} MiB, cannot be made: {error.strerror}.",
                hint=f"Make {directory} larger (docker run --shm-size)."
                if error.errno == errno.ENOSPC
                else 'Use the collectives "gloo" if this cannot be mended.',
            ) from error
        return cls(layout, mapping, descriptor, directory / name)

    @classmethod
    def open(cls, name: str, size: int, *, directory: Path = DIRECTORY) -> Segment:
        """Map a segment that the owner has made.

        Raises:
            CollectiveError: There is none, or it is another one.
        """
        path = directory / name
        try:
            with open(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW), "r+b") as file:
                mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        except OSError as error:
            raise CollectiveError(f"{path}, the group's shared memory, cannot be opened: {error.strerror}.") from error
        magic, found, _, slot_bytes, mailbox_slot_bytes = _HEAD.unpack_from(mapping)
        if magic != _MAGIC or found != size:
            said = f"of {found} ranks" if magic == _MAGIC else "no memory of a group"
            raise CollectiveError(f"{path} is {said}; this rank expects a group of {size}.")
        return cls(Layout(size, slot_bytes, mailbox_slot_bytes), mapping)

    def unlink(self) -> None:
        """Remove the name, and the owner's lock; ranks that have it mapped go on. May be called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0 and self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            os.close(descriptor)


def _whole_pages(num_bytes: int) -> int:
    return max(1, num_bytes // 4096) * 4096


def _link(descriptor: int, path: Path) -> None:
    """Give a file a name; an OSError if there is one of that name."""
    folder = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(str(descriptor), path, src_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def remove_leftovers(*, directory: Path = DIRECTORY) -> tuple[str, ...]:
    """Remove segments whose owner has ended, and return their names; those of other users stay.

    An owner holds a lock on its file for as long as it lives, and the kernel gives it up with the process. So neither a new process
    with an old number nor an owner in another container is mistaken.
    """
    removed = []
    for path in sorted(directory.glob("trencadis-*")):
        if not _NAME.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path.name)
            finally:
                os.close(descriptor)
    return tuple(removed)
