"""Lock file with the process that runs the cluster at a port."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from trencadis.errors import ConfigError

__all__ = ["end_cluster", "running_at"]

_POLL_S = 0.05


@contextlib.contextmanager
def running_at(port: int) -> Iterator[None]:
    """Hold the lock of a cluster at a port while the block runs.

    Raises:
        ConfigError: A cluster runs at this port already.
    """
    with _opened(port, create=True) as file:
        if not _locks(file):
            raise ConfigError(
                f"trencadis cluster: a cluster runs at port {port} already.",
                hint=f"End it with trencadis cluster down --port {port}, or choose another --port.",
            )
        os.ftruncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
        try:
            yield
        finally:
            _path(port).unlink(missing_ok=True)


def end_cluster(port: int, *, timeout_s: float) -> None:
    """Stop the cluster at a port, and wait for its end.

    Raises:
        ConfigError: No cluster runs at this port, or it did not end within ``timeout_s``.
    """
    try:
        with _opened(port, create=False) as file:
            if not _locks(file):
                os.kill(int(os.pread(file, 32, 0)), signal.SIGTERM)
                _wait(file, port, timeout_s)
                return
    except FileNotFoundError:
        pass
    raise ConfigError(
        f"trencadis cluster: no cluster of this user runs at port {port}.",
        hint="Say --port if it is another.",
    )


def _wait(file: int, port: int, timeout_s: float) -> None:
    until_s = time.monotonic() + timeout_s
    while not _locks(file):
        if time.monotonic() > until_s:
            raise ConfigError(f"trencadis cluster: the cluster at port {port} has not ended within {timeout_s:g} s.")
        time.sleep(_POLL_S)


def _path(port: int) -> Path:
    return Path(tempfile.gettempdir()) / f"trencadis-cluster-{os.getuid()}-{port}"


@contextlib.contextmanager
def _opened(port: int, *, create: bool) -> Iterator[int]:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    try:
        file = os.open(_path(port), flags, 0o600)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{_path(port)} cannot be used: {error.strerror}.", hint="Remove it.") from error
    try:
        if os.fstat(file).st_uid != os.getuid():
            raise ConfigError(f"{_path(port)} is not this user's.", hint="Remove it, or choose another --port.")
        yield file
    finally:
        os.close(file)


def _locks(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
