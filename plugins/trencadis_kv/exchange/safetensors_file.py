"""Safetensors files larger than memory: tensors of every dtype as mapped bytes, written in place.

The safetensors library reads and writes only whole tensors, and no bfloat16 through NumPy.

Source: safetensors' README, section Format: u64 length of the header, header as JSON, tensors without gaps; little endian.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
from numpy.typing import NDArray

from trencadis.errors import ConfigError

__all__ = ["DTYPES", "StoredTensor", "read_tensors", "write_tensors"]

DTYPES: Final[Mapping[str, str]] = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "uint64": "U64",
    "int8": "I8",
    "uint8": "U8",
}
"""Names in the format, by dtype."""

_ITEM_BYTES: Final = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "U64": 8}
_MAX_HEADER_BYTES: Final = 100_000_000


@attrs.frozen(kw_only=True, eq=False)
class StoredTensor:
    """Entry of a tensor in a file.

    Attributes:
        dtype: Name of the dtype in the format, such as ``BF16``.
        shape: Elements along each axis.
        data: Bytes of the tensor, mapped from the file; empty for one that is not written yet.
    """

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8] = attrs.field(factory=lambda: np.empty(0, np.uint8))

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * _ITEM_BYTES.get(self.dtype, 1)


@contextlib.contextmanager
def write_tensors(
    file: Path, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str]
) -> Iterator[Mapping[str, NDArray[np.uint8]]]:
    """Create a file, and yield each tensor's bytes to be filled; moved to its path at the end if nothing was raised.

    Args:
        file: Path of the file; an existing file is replaced.
        tensors: Tensors by name, without data.
        metadata: Metadata of the file, any texts by key.

    Raises:
        ConfigError: The file cannot be written.
    """
    head, start = _head(tensors, metadata)
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
    try:
        try:
            with temporary.open("xb") as stream:
                stream.write(head)
                # The disk space is allocated at once: writing to a mapped file with holes kills the process when the
                # disk is full.
                os.posix_fallocate(stream.fileno(), 0, len(head) + start[-1])
            whole = np.memmap(temporary, np.uint8, mode="r+", offset=len(head), shape=(start[-1],))
            yield {name: whole[start[i] : start[i + 1]] for i, name in enumerate(tensors)}
            whole.flush()
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be written: {error.strerror or error}.", hint="Give another path."
        ) from error


def read_tensors(file: Path) -> tuple[Mapping[str, StoredTensor], Mapping[str, str]]:
    """Return the tensors of a file, mapped, and its metadata.

    Raises:
        ConfigError: The file cannot be read, or is no safetensors file.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            head_bytes = int.from_bytes(stream.read(8), "little")
            if size < 8 or head_bytes > min(size - 8, _MAX_HEADER_BYTES):
                raise ValueError(f"{size} bytes, and a header of {head_bytes}")
            head = json.loads(stream.read(head_bytes))
        data = (
            np.memmap(file, np.uint8, mode="r", offset=8 + head_bytes)
            if size > 8 + head_bytes
            else np.empty(0, np.uint8)
        )
        metadata = head.pop("__metadata__", {})
        tensors = {name: _tensor(facts, data) for name, facts in head.items()}
        return tensors, {str(key): str(value) for key, value in metadata.items()}
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}.", hint="Check the path.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file}: no safetensors file: {error}.", hint="Export it again.") from error


def _head(tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str]) -> tuple[bytes, Sequence[int]]:
    """Return the header bytes, and each tensor's offset after them, with the end."""
    start = [0]
    head: dict[str, Any] = {"__metadata__": dict(metadata)}
    for name, tensor in tensors.items():
        start.append(start[-1] + tensor.num_bytes)
        head[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": start[-2:]}
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text, start


def _tensor(facts: Mapping[str, Any], data: NDArray[np.uint8]) -> StoredTensor:
    begin, end = (int(offset) for offset in facts["data_offsets"])
    shape = tuple(int(length) for length in facts["shape"])
    if not 0 <= begin <= end <= len(data) or min(shape, default=0) < 0:
        raise ValueError(f"a tensor from {begin} to {end} in {len(data)} bytes")
    return StoredTensor(dtype=str(facts["dtype"]), shape=shape, data=data[begin:end])
