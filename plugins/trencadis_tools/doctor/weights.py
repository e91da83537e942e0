"""Checks of weights on disk: all shards exist, each with the length in its header."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from trencadis_tools.doctor.findings import Findings

__all__ = ["check_weights"]

_AGAIN = "Fetch the model again; an interrupted download leaves such files."
_INDEX = "model.safetensors.index.json"
_LFS = b"version https://git-lfs"
_LONGEST_HEADER = 100_000_000


def check_weights(found: Findings, place: Path, path: str) -> int:
    """Check the ``.safetensors`` files of a directory; return their size in bytes, 0 if one is faulty.

    Args:
        found: Findings to add to.
        place: Directory of the model.
        path: Model path in the configuration.
    """
    files = sorted(place.glob("*.safetensors"))
    missing = _missing(place)
    if missing:
        found.fail(f"model {path}: {len(missing)} files of weights are missing: {', '.join(missing[:3])}", _AGAIN)
    if not files:
        others = sorted(item.name for item in place.iterdir() if item.suffix in {".bin", ".pt", ".pth"})
        if others:
            found.fail(
                f"model {path}: only pickled weights, which are never read: {', '.join(others[:3])}",
                "Convert them to safetensors, or take a revision of the model that has them.",
            )
        elif not missing:
            found.fail(f"model {path}: no *.safetensors in {place}", _AGAIN)
        return 0
    faults = [f"{file.name} {fault}" for file in files for fault in _faults(file)]
    for fault in faults:
        found.fail(f"model {path}: {fault}", _AGAIN)
    return 0 if faults or missing else sum(file.stat().st_size for file in files)


def _missing(place: Path) -> list[str]:
    """Return the shards that are in the index but not in the directory."""
    index = place / _INDEX
    if not index.is_file():
        return []
    shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return sorted({shard for shard in shards if not (place / shard).is_file()})


def _faults(file: Path) -> Iterator[str]:
    """Yield the faults of one file.

    Source: safetensors format: 8 bytes little-endian length of a JSON header, then the data it describes.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            start = stream.read(len(_LFS))
            if start == _LFS:
                yield "is a git-lfs pointer, not the weights: run git lfs pull"
                return
            length = int.from_bytes(start[:8], "little")
            if size < 8 or length > min(size, _LONGEST_HEADER):
                yield f"is no safetensors file ({size} bytes)"
                return
            stream.seek(8)
            header = json.loads(stream.read(length))
    except OSError as error:
        yield f"cannot be read: {error.strerror}"
        return
    except ValueError:
        yield "has a broken header"
        return
    end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    if size < 8 + length + end:
        yield f"is cut off: {size} bytes of {8 + length + end}"
