"""A directory of objects, one file per key: the store of one machine, or of several with a shared file system.

    kv1/default/1f…/0.0.0-8/3fa9…   the key
    kv1/default/1f…/0.0.0-8/3/3f/3fa9…   its file: 256 folders under each prefix
    kv1/default/1f…/0.0.0-8/3/3f/.9c41….tmp   while it is written

A file is written under a temporary name, and renamed when it is complete. A reader of a file that is replaced or
deleted reads the old content to its end. Any number of processes may use one directory; none of them keeps an index.

The modification time of a file is its last use. Readers' checks detect accidents only, so files of other users, links,
files in linked folders and anything but regular files count as missing, and a directory that others can write to is
refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import attrs

from trencadis_kv.store.directory_owner import DirectoryOwner

__all__ = ["ObjectDirectory", "StoredObject"]

_KEY: Final = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]*/)*[A-Za-z0-9_-][A-Za-z0-9._-]*")
_NOT_THERE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR})
_TOUCH_NS: Final = 300 * 10**9
"""Least time between two records of an object's use: each is a write to the disk."""
_MINUTE_NS: Final = 60 * 10**9
_LINK_CHECK_S: Final = 1.0
"""Time for which a folder that was no link is not checked again: the check costs several times what looking for a file does."""
_MAX_CHECKED: Final = 4096
_MAX_READ_BYTES: Final = 1 << 30
"""Most bytes per read; Linux reads no more than 2 GiB at once."""


@attrs.frozen(kw_only=True)
class StoredObject:
    """Directory entry of an object.

    Attributes:
        key: Key of the object.
        num_bytes: Bytes of header and payload.
        used_ns: Last use, nanoseconds since 1970 by the file system's clock; precise to about a minute.
    """

    key: str
    num_bytes: int
    used_ns: int


class ObjectDirectory:
    """Reads and writes objects; keeps no file open. From any thread, several at once.

    Args:
        root: Path of the directory; created on first use if its parent allows it.
        fsync: Whether to wait until an object is on the disk. Without it a crash of the machine can leave a broken
            object, which readers notice.
        trust_others: Whether to use a directory, and objects, that belong to other users or that others can write to.
    """

    def __init__(self, root: Path, *, fsync: bool = False, trust_others: bool = False) -> None:
        self.root = root
        self._prefix = f"{root}/"
        self._fsync = fsync
        self._trust_others = trust_others
        self._owner = DirectoryOwner(root, trust_others=trust_others)
        self._is_known_writable = False
        self._checked: dict[str, float] = {}

    def check(self) -> None:
        """Create the directory if it is missing.

        Raises:
            TransferError: ``unreachable``: the directory cannot be used, or must not be; the message says why.
        """
        self._owner.check()

    def holds(self, key: str) -> bool:
        """Return whether an object exists.

        Raises:
            TransferError: ``unreachable``.
        """
        folder, path = self._path(key)
        try:
            return self._owner.owns(os.stat(path, follow_symlinks=False)) and not self._is_linked(folder)
        except OSError as error:
            return self._missing(error)

    def read_into(self, key: str, target: memoryview) -> int:
        """Read an object; return its bytes, or -1 if it is missing or longer than ``target``.

        Raises:
            TransferError: ``unreachable``.
        """
        folder, path = self._path(key)
        if self._is_linked(folder):
            return -1
        try:
            # Without O_NONBLOCK, opening a named pipe would wait for ever.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(path, flags)
        except OSError as error:
            self._missing(error)
            return -1
        try:
            facts = os.fstat(descriptor)
            if not self._owner.owns(facts) or facts.st_size > target.nbytes:
                return -1
            _touch(descriptor, facts)
            return _read_all(descriptor, target[: facts.st_size])
        except OSError as error:
            raise self._owner.in_words(error) from error
        finally:
            os.close(descriptor)

    def read(self, key: str) -> bytes | None:
        """Return an object, or None if it is missing.

        Raises:
            TransferError: ``unreachable``.
        """
        try:
            size = os.stat(self._path(key)[1], follow_symlinks=False).st_size
        except OSError as error:
            self._missing(error)
            return None
        data = bytearray(size)
        num_bytes = self.read_into(key, memoryview(data))
        return None if num_bytes < 0 else bytes(data[:num_bytes])

    def write(self, key: str, pieces: Sequence[memoryview], *, used_ns: int = 0) -> None:
        """Write an object, replacing an older one of the same key.

        Args:
            key: Key of the object.
            pieces: Bytes of the object, in one or several pieces.
            used_ns: Last use, see :class:`StoredObject`; 0: now.

        Raises:
            TransferError: ``full`` or ``unreachable``; nothing has changed then.
        """
        folder, path = self._path(key)
        if self._is_linked(folder):
            raise self._owner.unusable(f"{folder}, or a folder above it, is a link", "Remove the link.")
        temporary = f"{folder}/.{secrets.token_hex(8)}.tmp"
        try:
            descriptor = self._create(folder, temporary)
            try:
                try:
                    self._fill(descriptor, pieces, used_ns)
                finally:
                    os.close(descriptor)  # on a network file system this is where a full disk shows
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            if self._fsync:
                _sync_folder(folder)
        except OSError as error:
            raise self._owner.in_words(error) from error

    def remove(self, key: str) -> None:
        """Remove an object, if it exists.

        Raises:
            TransferError: ``unreachable``.
        """
        folder, path = self._path(key)
        if self._is_linked(folder):
            return
        try:
            os.unlink(path)
        except OSError as error:
            if error.errno not in _NOT_THERE:
                raise self._owner.in_words(error) from error

    def folders(self) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
        """Yield each folder with its files, in no order; entries that are deleted meanwhile are left out.

        Raises:
            TransferError: ``unreachable``: the directory itself cannot be read.
        """
        try:
            os.scandir(self.root).close()
        except OSError as error:
            raise self._owner.in_words(error) from error
        waiting = [str(self.root)]
        while waiting:
            folder = waiting.pop()
            files = []
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        files.append(entry)
            yield folder, files

    def objects(self) -> Iterator[StoredObject]:
        """Yield all objects, in no order.

        Raises:
            TransferError: ``unreachable``: the directory itself cannot be read.
        """
        for _, files in self.folders():
            yield from (found for found in map(self.object_of, files) if found is not None)

    def object_of(self, entry: os.DirEntry[str]) -> StoredObject | None:
        """Return the object of a file, or None if it is not one or was deleted."""
        *folders, name = entry.path.removeprefix(self._prefix).split("/")
        key = "/".join([*folders[:-2], name])
        if folders[-2:] != [name[:1], name[:2]] or not _is_key(key):
            return None
        try:
            facts = entry.stat(follow_symlinks=False)
        except OSError:
            return None
        if not self._owner.owns(facts):
            return None
        return StoredObject(key=key, num_bytes=facts.st_size, used_ns=facts.st_mtime_ns)

    # ---------------------------------------------------------------------------------------------- helpers

    def _path(self, key: str) -> tuple[str, str]:
        """Return the folder and the file of a key. Pure.

        Raises:
            ValueError: The key could name a file outside, or one that is being written.
        """
        if not _is_key(key):
            raise ValueError(
                f"{key[:250]!r} is no key: up to 200 of A-Za-z0-9._-/ are, no part of it empty or with a dot in front."
            )
        above, _, name = key.rpartition("/")
        folder = f"{self._prefix}{above}{'/' if above else ''}{name[:1]}/{name[:2]}"
        return folder, f"{folder}/{name}"

    def _is_linked(self, folder: str) -> bool:
        """Return whether a folder, or one above it inside the directory, is a link."""
        now_s = time.monotonic()
        if self._checked.get(folder, 0.0) > now_s:
            return False
        made = str(self.root)
        for part in folder.removeprefix(self._prefix).split("/"):
            made = f"{made}/{part}"
            try:
                facts = os.lstat(made)
            except OSError:
                return False  # it is not there
            if stat.S_ISLNK(facts.st_mode):
                return True
        if len(self._checked) >= _MAX_CHECKED:
            self._checked.clear()
        self._checked[folder] = now_s + _LINK_CHECK_S
        return False

    def _create(self, folder: str, temporary: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        mode = 0o660 if self._trust_others else 0o600
        for _ in range(3):
            with contextlib.suppress(FileNotFoundError):
                return os.open(temporary, flags, mode)
            self._make_folders(folder)  # another process removes folders that it finds empty
        return os.open(temporary, flags, mode)

    def _make_folders(self, folder: str) -> None:
        self.check()
        made = str(self.root)
        for part in folder.removeprefix(self._prefix).split("/"):
            made = f"{made}/{part}"
            with contextlib.suppress(FileExistsError):
                os.mkdir(made, 0o770 if self._trust_others else 0o700)

    def _fill(self, descriptor: int, pieces: Sequence[memoryview], used_ns: int) -> None:
        if not self._is_known_writable and not self._owner.owns(os.fstat(descriptor)):
            raise self._owner.unusable(
                "files written to it belong to another user", "Set trust_others, as for a squashed NFS."
            )
        self._is_known_writable = True
        _write_all(descriptor, pieces)
        if used_ns:
            os.utime(descriptor, ns=(used_ns, used_ns))
        if self._fsync:
            os.fsync(descriptor)

    def _missing(self, error: OSError) -> bool:
        """Return False for an error that means that an object is not there.

        Raises:
            TransferError: The error means something else.
        """
        if error.errno in _NOT_THERE:
            return False
        if error.errno == errno.EACCES:
            self.check()  # an unreadable file counts as missing, an unreadable directory is an error
            return False
        raise self._owner.in_words(error) from error


def _is_key(key: str) -> bool:
    return len(key) <= 200 and _KEY.fullmatch(key) is not None


def _touch(descriptor: int, facts: os.stat_result) -> None:
    """Set a file's time of last use, if the old one is long ago; errors are ignored, since only eviction needs it."""
    now = time.time_ns()
    if abs(now - facts.st_mtime_ns) > _TOUCH_NS:
        # The last full minute, and the old seconds: objects that were written together keep their order.
        used_ns = now - now % _MINUTE_NS - _MINUTE_NS + facts.st_mtime_ns % _MINUTE_NS
        with contextlib.suppress(OSError):
            os.utime(descriptor, ns=(used_ns, used_ns))


def _read_all(descriptor: int, target: memoryview) -> int:
    """Read until the target is full or the file ends; return the number of bytes."""
    done = 0
    while done < target.nbytes:
        num_bytes = os.readv(descriptor, [target[done : done + _MAX_READ_BYTES]])
        if not num_bytes:
            break
        done += num_bytes
    return done


def _write_all(descriptor: int, pieces: Sequence[memoryview]) -> None:
    left = [piece.cast("B") for piece in pieces if piece.nbytes]
    while left:
        num_bytes = os.writev(descriptor, left[:64])
        while left and num_bytes >= left[0].nbytes:
            num_bytes -= left.pop(0).nbytes
        if left:
            left[0] = left[0][num_bytes:]


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
