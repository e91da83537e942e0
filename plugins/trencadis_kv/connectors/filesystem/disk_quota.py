"""Disk quota of a directory of blocks, and eviction when it is exceeded.

There is no index: engines share a directory, and each counts only what it wrote itself. A sweep looks at every file. It
starts with the engine, when about 5 % of the limit was written since the last sweep, and when the limit is reached. It
evicts the least recently used objects until the low-water mark is reached; a read of an evicted block is a miss.
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trencadis.errors import TransferError
from trencadis_kv.store.object_directory import ObjectDirectory

__all__ = ["DiskQuota"]

_SHARE: Final = 0.05
"""Fraction of the limit that is written between two sweeps, and the most by which it may be exceeded during one."""
_STALE_NS: Final = 3600 * 10**9
"""Age at which the writer of an unfinished file is taken for dead."""
_REST: Final = 4.0
"""Pause after each folder, as a multiple of the time spent on it: a sweep shares its processor with the engine."""
_CLOSE_S: Final = 2.0
_SILENCE_S: Final = 60.0
_CLAIM: Final = ".sweep"
_LOG = logging.getLogger("trencadis.kv.filesystem")


class DiskQuota:
    """The limits of one directory, for all stores of one engine. From any thread.

    Args:
        directory: Directory whose files are counted and deleted.
        max_bytes: Maximum bytes of objects; 0: no limit. Each of several engines may exceed it by up to 5 %.
        low_water_ratio: Fraction of ``max_bytes`` that an eviction leaves.
        min_free_ratio: Fraction of the disk that must stay free; nothing is written below it.
        sweeps: Whether to sweep; False for a directory that is only read.
        rests: Whether a sweep pauses between folders, so that the engine can run.
    """

    def __init__(
        self,
        directory: ObjectDirectory,
        *,
        max_bytes: int,
        low_water_ratio: float = 0.9,
        min_free_ratio: float = 0.0,
        sweeps: bool = True,
        rests: bool = True,
    ) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._low_water_bytes = int(max_bytes * low_water_ratio)
        self._min_free_ratio = min_free_ratio
        self._sweeps = sweeps
        self._rests = rests
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._num_new_bytes = 0
        self._num_stores = 0
        self._sweeper: threading.Thread | None = None
        self._next_sweep_s = 0.0
        self._next_word_s = 0.0
        self._stop = threading.Event()

    def opened(self) -> None:
        """Count a store; the first one starts a sweep in the background."""
        with self._lock:
            self._num_stores += 1
            if self._num_stores == 1:
                self._stop.clear()
                self._start_sweep()

    def closed(self) -> None:
        """Count a closed store; the last one stops a running sweep."""
        with self._lock:
            self._num_stores -= 1
            sweeper = self._sweeper
            if self._num_stores:
                return
            self._stop.set()
        if sweeper is not None:
            sweeper.join(_CLOSE_S)

    def take(self, num_bytes: int) -> bool:
        """Reserve bytes; False if there is no room."""
        if not self._disk_has(num_bytes):
            self.refused(
                f"The disk of the KV directory {self._directory.root} has less than min_free_ratio = {self._min_free_ratio:g} of "
                "it free; until it has more, nothing is saved."
            )
            return False
        with self._lock:
            if not self._max_bytes:
                return True
            would_be = self._num_bytes + num_bytes
            if would_be > self._max_bytes or self._num_new_bytes > _SHARE * self._max_bytes:
                self._start_sweep()
            if would_be > self._max_bytes * (1 + _SHARE) or num_bytes > self._max_bytes:
                return False
            self._num_bytes = would_be
            self._num_new_bytes += num_bytes
            return True

    def refused(self, why: str) -> None:
        """Log that an object was not written, at a limited rate."""
        with self._lock:
            now = time.monotonic()
            if now < self._next_word_s:
                return
            self._next_word_s = now + _SILENCE_S
        _LOG.warning("%s", why)

    def sweep(self) -> int:
        """Count all objects, delete leftovers of dead writers, evict to the low-water mark; return the objects evicted.

        Does nothing while another engine sweeps.

        Raises:
            TransferError: ``unreachable``: the directory cannot be read.
        """
        self._directory.check()
        with self._claim() as now_ns:
            if now_ns is None:
                return 0
            with self._lock:
                self._num_new_bytes = 0
            used, sizes = self._count(now_ns)
            if self._stop.is_set():
                return 0
            num_evicted = 0
            if self._max_bytes and sizes.sum() > self._max_bytes:
                num_evicted, num_bytes = self._evict(used, sizes)
                _LOG.info("%s: %d KV objects evicted, %d bytes", self._directory.root, num_evicted, num_bytes)
                sizes = np.append(sizes, -num_bytes)
            with self._lock:
                self._num_bytes = int(sizes.sum()) + self._num_new_bytes
            return num_evicted

    # ---------------------------------------------------------------------------------------------- helpers

    def _start_sweep(self) -> None:
        """Start a sweep in the background, unless one is running or just ran. The lock is held."""
        now = time.monotonic()
        if not self._sweeps:
            return
        if (self._sweeper is not None and self._sweeper.is_alive()) or now < self._next_sweep_s or self._stop.is_set():
            return
        self._next_sweep_s = now + 1.0
        self._sweeper = threading.Thread(target=self._sweep_aside, name="kv-filesystem-sweep", daemon=True)
        self._sweeper.start()

    def _sweep_aside(self) -> None:
        try:
            self.sweep()
        except (OSError, TransferError) as error:
            _LOG.warning("no KV object can be evicted: %s", error)

    def _disk_has(self, num_bytes: int) -> bool:
        if not self._min_free_ratio:
            return True
        try:
            disk = os.statvfs(self._directory.root)
        except OSError:
            return True  # the write reports what is wrong
        free_bytes = disk.f_bavail * disk.f_frsize - num_bytes
        return free_bytes >= self._min_free_ratio * disk.f_blocks * disk.f_frsize

    @contextlib.contextmanager
    def _claim(self) -> Iterator[int | None]:
        """Lock the directory against sweeps of other engines; yields the file system's time, or None if it is locked."""
        import fcntl

        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._directory.root / _CLAIM, flags, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            except (
                OSError
            ):  # no locks on this file system: two sweeps at once evict the same objects, which does no harm
                pass
            os.utime(descriptor)
            yield os.fstat(descriptor).st_mtime_ns
        finally:
            os.close(descriptor)

    def _count(self, now_ns: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return each object's last use and bytes; deletes leftovers of dead writers."""
        used, sizes = array.array("q"), array.array("q")
        for _, files in self._folders():
            for entry in files:
                found = self._directory.object_of(entry)
                if found is not None:
                    used.append(found.used_ns)
                    sizes.append(found.num_bytes)
                elif entry.name.endswith(".tmp"):
                    _remove_stale(entry, now_ns - _STALE_NS)
        return np.array(used, np.int64), np.array(sizes, np.int64)

    def _evict(self, used: NDArray[np.int64], sizes: NDArray[np.int64]) -> tuple[int, int]:
        """Delete the least recently used objects; return how many, and their bytes."""
        order = np.argsort(used, kind="stable")
        excess = int(sizes.sum()) - self._low_water_bytes
        last = int(np.searchsorted(np.cumsum(sizes[order]), excess))
        threshold_ns = int(used[order[min(last, len(order) - 1)]])
        num_evicted = num_bytes = 0
        for folder, files in self._folders():
            if not files and folder != str(self._directory.root):
                with contextlib.suppress(OSError):  # the folder is not empty, or another engine is about to write here
                    os.rmdir(folder)
            for entry in files:
                found = self._directory.object_of(entry) if num_bytes < excess else None
                # A file that was used since it was counted is newer than the threshold.
                if found is not None and found.used_ns <= threshold_ns:
                    self._directory.remove(found.key)
                    num_evicted, num_bytes = num_evicted + 1, num_bytes + found.num_bytes
        return num_evicted, num_bytes

    def _folders(self) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
        """Yield folders, with pauses; ends early when the engine closes."""
        for folder, files in self._directory.folders():
            began = time.perf_counter()
            if self._stop.is_set():
                return
            yield folder, files
            if self._rests:
                self._stop.wait(min(0.05, _REST * (time.perf_counter() - began)))


def _remove_stale(entry: os.DirEntry[str], before_ns: int) -> None:
    with contextlib.suppress(OSError):
        if entry.stat(follow_symlinks=False).st_mtime_ns < before_ns:
            os.unlink(entry.path)
