"""The user's cache of loaded models: for each key a directory with a description and one file of tensors, which is mapped.

    <cache>/models/<key>/record         a digest, where tensors lie, and what they belong to: three lines, two of JSON
    <cache>/models/<key>/tensors        read where it lies, by all processes the same memory

Directories are made aside and renamed, so each is whole. Only what belongs to this user or root, and no other may write to, is read. What
was used longest ago goes when there is no room.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import torch

from trencadis.caches import cache_directory
from trencadis_torch.native_build import why_unsafe, writable_directory
from trencadis_torch.remembered.values import NotPlainError, Place, Reader, Writer

__all__ = ["MAX_BYTES", "ModelStore"]

logger = logging.getLogger("trencadis.torch")

MAX_BYTES: Final = 64 * 2**30
"""All models together."""

FREE_SHARE: Final = 0.5
"""Largest share of the disk's free bytes that a model may take."""

_RECORD, _TENSORS = "record", "tensors"
_NEWLINE: Final = b"\n"
_MAKING: Final = "making-"
_ABANDONED_S: Final = 24 * 3600.0
"""A directory that was begun so long ago, and is not in its place, belongs to a process that was killed."""

_BLOCK: Final = 2 << 20
"""Bytes that are written at once: Linux keeps them in one page of this size, and maps it as one, which kernels read up to a fifth quicker."""


@attrs.frozen
class ModelStore:
    """Models by key.

    Attributes:
        directory: Where they lie.
        max_bytes: The most that all of them take.
    """

    directory: Path = attrs.field(factory=lambda: cache_directory("models"))
    max_bytes: int = MAX_BYTES

    def read(self, key: str, libraries: Mapping[str, Any]) -> Any:
        """Return what was written under a key, its tensors in mapped memory; None: nothing whole is there.

        Args:
            key: Hex digits.
            libraries: See :class:`~trencadis_torch.remembered.values.Reader`.
        """
        place = self.directory / key
        if not place.is_dir():
            return None
        try:
            reason = why_unsafe(place)
            if reason:
                raise NotPlainError(f"{place} {reason}")
            found = _read(place, libraries)
        except (OSError, ValueError, KeyError, IndexError, TypeError, RuntimeError, NotPlainError) as error:
            logger.warning("What is remembered of the model cannot be used, and is made again: %s.", error)
            shutil.rmtree(place, ignore_errors=True)
            return None
        with contextlib.suppress(OSError):
            os.utime(place)
        return found

    def write(self, key: str, value: Any, *, tensors: Iterable[torch.Tensor] = ()) -> int:
        """Write a value under a key; returns the bytes that it takes.

        Args:
            key: Hex digits.
            value: Objects of known classes.
            tensors: That structures of the kernels may point at, beside those of the value.

        Raises:
            NotPlainError: It cannot be written; nothing is.
            OSError: The disk does not take it; nothing is written.
        """
        writer = Writer()
        for tensor in tensors:
            writer.note(tensor)
        plain = json.dumps(writer.plain(value))
        size = writer.size + len(plain)
        directory = writable_directory(self.directory)
        self._make_room(directory, size)
        with tempfile.TemporaryDirectory(dir=directory, prefix=_MAKING) as made:
            room = Path(made) / key
            room.mkdir(mode=0o700)
            digest = _write_tensors(room / _TENSORS, writer)
            places = [attrs.astuple(place) for place in writer.places]
            head = json.dumps({"tensors": digest, "size": writer.size, "places": places})
            text = f"{head}\n{plain}".encode()
            _private(room / _RECORD, _digest(text).encode() + _NEWLINE + text)
            shutil.rmtree(directory / key, ignore_errors=True)
            with contextlib.suppress(OSError):  # another process was quicker: what it wrote is the same
                os.rename(room, directory / key)
        return size

    def _make_room(self, directory: Path, size: int) -> None:
        """Remove what was used longest ago until there is room.

        Raises:
            NotPlainError: There cannot be enough.
        """
        free = shutil.disk_usage(directory).free
        if size > self.max_bytes or size > FREE_SHARE * free:
            raise NotPlainError(f"{size / 2**20:.0f} MiB are too much: {directory} has {free / 2**20:.0f} MiB free")
        for place in directory.glob(f"{_MAKING}*"):
            if time.time() - _last_used(place) > _ABANDONED_S:
                shutil.rmtree(place, ignore_errors=True)
        kept = sorted((place for place in directory.iterdir() if (place / _RECORD).is_file()), key=_last_used)
        sizes = {place: sum(file.stat().st_size for file in place.iterdir()) for place in kept}
        while kept and sum(sizes[place] for place in kept) + size > self.max_bytes:
            shutil.rmtree(kept.pop(0), ignore_errors=True)


def _last_used(place: Path) -> float:
    return place.stat().st_mtime


def _read(place: Path, libraries: Mapping[str, Any]) -> Any:
    digest, _, text = (place / _RECORD).read_bytes().partition(_NEWLINE)
    if digest.decode() != _digest(text):
        raise NotPlainError(f"{place / _RECORD} is damaged")
    head, _, plain = text.partition(_NEWLINE)
    record = json.loads(head)
    file, size = place / _TENSORS, int(record["size"])
    if file.stat().st_size != size:
        raise NotPlainError(f"{file} has {file.stat().st_size} bytes, and should have {size}")
    content = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
    if _digest(content.numpy().data) != record["tensors"]:
        raise NotPlainError(f"{file} is damaged")
    places = [Place(at, dtype, tuple(shape)) for at, dtype, shape in record["places"]]
    return Reader(places, content, libraries).value(json.loads(plain))


def _digest(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


def _write_tensors(file: Path, writer: Writer) -> str:
    """Write all tensors, and return their digest."""
    digest, at = hashlib.sha256(), 0
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=_BLOCK) as opened:
        for first, piece in [*writer.pieces(), (writer.size, torch.empty(0, dtype=torch.uint8))]:
            for part in (memoryview(b"\0" * (first - at)), piece.numpy().data):
                digest.update(part)
                begin = 0
                while begin < len(part):  # up to the end of a block: then the buffer is full, and written
                    end = begin + _BLOCK - (at + begin) % _BLOCK
                    opened.write(part[begin:end])
                    begin = end
                at += len(part)
    return digest.hexdigest()


def _private(file: Path, content: bytes) -> None:
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(content)
