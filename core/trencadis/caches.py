"""The user's cache: a directory for each kind of content, and files that are believed only if they are whole and this user's alone.

    keep ▶ a file of its own, mode 0600 ▶ put in its place at once ▶ the oldest beyond the bound are removed
    kept ▶ owner and mode ▶ digest ▶ content | None

A file that is missing, damaged or another user's is as good as none: whoever asks makes its content again.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

__all__ = ["cache_directory", "keep", "kept"]

_DIGEST_BYTES: Final = 32
_MAX_FILES: Final = 256
"""Most files of a directory: small ones do not add up to what takes long to list."""
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def cache_directory(kind: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of a kind of content: ``$XDG_CACHE_HOME/trencadis/<kind>``, by default under ``~/.cache``."""
    root = environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root else Path.home() / ".cache") / "trencadis" / kind


def kept(file: Path) -> bytes | None:
    """Return what was kept in a file; None: nothing, or it is damaged, or another user could have written it."""
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
            facts = os.fstat(opened.fileno())
            is_ours = facts.st_uid in (os.geteuid(), 0) and not facts.st_mode & _OTHERS_WRITE
            if not is_ours or not stat.S_ISREG(facts.st_mode):
                return None
            whole = opened.read()
    except OSError:
        return None
    content = whole[:-_DIGEST_BYTES]
    if len(whole) < _DIGEST_BYTES or _digest(content) != whole[-_DIGEST_BYTES:]:
        return None
    with contextlib.suppress(OSError):
        os.utime(file)  # the oldest that go first are those that nobody has read for longest
    return content


def keep(file: Path, content: bytes, *, max_bytes: int) -> None:
    """Keep content in a file, for any number of processes at the same time; where it cannot be, it is not.

    Args:
        file: In a directory of its kind, which is made if there is none.
        content: Content of the file.
        max_bytes: The most that all files of the directory may take: the oldest go, also of more than 256 files.
    """
    if len(content) + _DIGEST_BYTES > max_bytes:
        return
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        number, room = tempfile.mkstemp(dir=file.parent, prefix=".")
        try:
            with open(number, "wb") as opened:
                opened.write(content + _digest(content))
            os.replace(room, file)
        except OSError:
            os.unlink(room)
            raise
        _bound(file.parent, max_bytes)


def _bound(directory: Path, max_bytes: int) -> None:
    found = []
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process was quicker
            facts = path.lstat()
            found.append((facts.st_mtime_ns, facts.st_size, path))
    total = 0
    for number, (_, size, path) in enumerate(sorted(found, reverse=True)):
        total += size
        if total > max_bytes or number >= _MAX_FILES:
            path.unlink(missing_ok=True)


def _digest(content: bytes) -> bytes:
    import hashlib

    return hashlib.sha256(content).digest()
