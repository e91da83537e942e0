"""Tensors of safetensors files, mapped into memory: a tensor is a view of its file, and pages of it can be let go of.

Source: the format's documentation, huggingface/safetensors: 8 bytes of length, JSON, then tensors.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import torch

from trencadis.errors import ModelLoadError

__all__ = ["MappedTensors", "weight_files"]

_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
}

_MAX_HEADER_BYTES: Final = 100_000_000
"""The most that a file's header may have."""


@attrs.frozen
class _Place:
    """A tensor's place in a file."""

    file: int
    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int


class MappedTensors:
    """Tensors by their names in files.

    Args:
        paths: The files; of a name that is in several, the last counts.

    Raises:
        ModelLoadError: A file is no safetensors file, or is cut off.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = list(paths)
        self._maps: list[mmap.mmap] = []
        self._places: dict[str, _Place] = {}
        for index, path in enumerate(self._paths):
            with path.open("rb") as file:
                # Copied on writing: a view may be written to, and the file stays as it is.
                self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
            self._places.update(_places(self._maps[-1], index, path))

    def names(self) -> frozenset[str]:
        """Return the names of all tensors."""
        return frozenset(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape.

        Raises:
            KeyError: There is no such tensor.
        """
        return self._places[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's data type.

        Raises:
            KeyError: There is no such tensor.
            ModelLoadError: PyTorch has no such type.
        """
        place = self._places[name]
        if place.dtype not in _DTYPES:
            raise ModelLoadError(
                f"{self._paths[place.file]}: {name} has the data type {place.dtype}, which is not known."
            )
        return _DTYPES[place.dtype]

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as stored: a view of its file, or a copy where it lies at no multiple of its elements' size.

        Raises:
            KeyError: There is no such tensor.
            ModelLoadError: PyTorch has no such type.
        """
        place, dtype = self._places[name], self.dtype(name)
        shape = (*place.shape[:-1], place.shape[-1] // 2) if place.dtype == "F4" else place.shape
        if place.first == place.last:
            return torch.empty(shape, dtype=dtype)
        size = place.last - place.first
        raw = torch.frombuffer(self._maps[place.file], dtype=torch.uint8, offset=place.first, count=size)
        if place.first % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(shape)

    def let_go(self) -> None:
        """Take all pages of the files out of this process's memory; a view that is read later has them read again."""
        for one in self._maps:
            one.madvise(mmap.MADV_DONTNEED)


def _places(mapped: mmap.mmap, index: int, path: Path) -> dict[str, _Place]:
    length = int.from_bytes(mapped[:8], "little")
    start = 8 + length
    if length > _MAX_HEADER_BYTES or start > len(mapped):
        raise ModelLoadError(f"{path}: no safetensors file: its header would have {length} bytes.")
    try:
        header: dict[str, Any] = json.loads(mapped[8:start])
        header.pop("__metadata__", None)
        places = {
            name: _Place(index, one["dtype"], tuple(one["shape"]), *(start + at for at in one["data_offsets"]))
            for name, one in header.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelLoadError(f"{path}: no safetensors file: its header cannot be read: {error}.") from error
    for name, place in places.items():
        _check(name, place, path, len(mapped), start)
    return places


def _check(name: str, place: _Place, path: Path, num_bytes: int, start: int) -> None:
    if not start <= place.first <= place.last <= num_bytes:
        raise ModelLoadError(f"{path}: {name} lies beyond the file's end: the file is cut off.")
    if place.dtype not in _DTYPES:
        return  # said where it is read
    bits = 4 if place.dtype == "F4" else 8 * _DTYPES[place.dtype].itemsize
    num_elements = 1
    for size in place.shape:
        num_elements *= size
    if num_elements * bits != 8 * (place.last - place.first):
        raise ModelLoadError(
            f"{path}: {name} of shape {list(place.shape)} and type {place.dtype} has {place.last - place.first} bytes."
        )


def weight_files(name: str, *, revision: str | None = None) -> list[Path]:
    """Return a model's files of weights; of a hub's model they are fetched if need be.

    Args:
        name: Directory or hub id.
        revision: Branch, tag or commit of a model on the hub.

    Raises:
        OSError: There are none, or one that the index names is not there.
    """
    for known in ("model.safetensors.index.json", "model.safetensors"):
        path = _file(name, known, revision)
        if path is None:
            continue
        if path.suffix == ".safetensors":
            return [path]
        names = sorted(set(json.loads(path.read_text())["weight_map"].values()))
        found = [(one, _file(name, one, revision)) for one in names]
        missing = [one for one, at in found if at is None]
        if missing:
            raise OSError(f"{path} names {missing[0]}, which is not there")
        return [at for _, at in found if at is not None]
    raise OSError("no model.safetensors, and no index of several files")


def _file(name: str, known: str, revision: str | None) -> Path | None:
    if Path(name).is_dir():
        path = Path(name) / known
        return path if path.is_file() else None
    from transformers.utils import cached_file

    found = cached_file(name, known, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)
