"""Small ``.gguf`` files, by the writer of the package ``gguf``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np


def write_gguf(path: Path, architecture: str, *, metadata: Mapping[str, Any], tensors: Mapping[str, Any] = {}) -> Path:
    """Write a file and return its path.

    Before keys that begin with a dot goes the family. Tensors are float arrays, or pairs of rows of blocks, uint8, and their kind.
    """
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _add(writer, architecture + key if key.startswith(".") else key, value)
    for name, one in tensors.items():
        if isinstance(one, tuple):
            writer.add_tensor(name, np.ascontiguousarray(one[0]), raw_dtype=gguf.GGMLQuantizationType[one[1]])
        else:
            writer.add_tensor(name, np.ascontiguousarray(one))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def random_blocks(kind: str, shape: Iterable[int], *, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return rows of blocks of a kind, such as ``Q4_K``, uint8, whose scales are small numbers and whose other bits are random."""
    from trencadis.gguf_file import KINDS

    found = next(one for one in KINDS.values() if one.name == kind)
    rows, columns = shape
    bits = np.random.default_rng(seed).integers(0, 256, (rows, columns // found.block, found.num_bytes), np.uint8)
    for at in _HALVES.get(kind, (0,)):
        halves = np.random.default_rng(seed + 1).normal(0, 0.002, bits.shape[:2]).astype(np.float16)
        bits[..., at : at + 2] = halves[..., None].view(np.uint8)
    if kind == "MXFP4":
        bits[..., 0] = np.arange(bits[..., 0].size).reshape(bits.shape[:2]) % 250
    return bits.reshape(rows, -1)


_HALVES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "MXFP4": (),
}
"""Where blocks have float16 numbers."""
