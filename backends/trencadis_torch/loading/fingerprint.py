"""A digest of a model's files: equal for the same files wherever they lie, another one for another fine-tune.

Reading 500 GB would take minutes, so of each file of weights a part stands for the whole: its size, its header, samples at even
distances, and a piece from the middle of every tensor, for a fine-tune may change a few tensors only.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from trencadis_torch.loading.loader import ModelFiles

if TYPE_CHECKING:
    from hashlib import blake2b

__all__ = ["fingerprint", "quantised_fingerprint"]

logger = logging.getLogger("trencadis.torch")

_NUM_SAMPLES: Final = 32
_SAMPLE_BYTES: Final = 64 * 1024
_TENSOR_BYTES: Final = 4 * 1024
_MAX_HEADER_BYTES: Final = 100_000_000
"""The most that a safetensors file's header may have. Source: the format's documentation, huggingface/safetensors."""


def fingerprint(files: ModelFiles) -> str:
    """Return the digest of config, code and weights, 32 hex digits; empty, with a warning, where they cannot be read.

    A change outside the samples that leaves file size, header and the middle of every tensor as they were goes unnoticed: one that
    somebody makes on purpose.

    Args:
        files: The model.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"kv1-model")
    try:
        paths = _paths(files)
        for path in paths:
            part = hashlib.blake2b(digest_size=32)
            with path.open("rb") as file:
                _take_file(part, file, path)
            digest.update(part.digest())
    except (OSError, ValueError) as error:
        logger.warning("%s has no fingerprint: %s. KV blocks are shared by its path only.", files.name, error)
        return ""
    return digest.hexdigest()


def quantised_fingerprint(plain: str, quantization: str) -> str:
    """Return the digest of a model whose weights were rounded after loading; empty where there is none. Pure.

    Args:
        plain: Fingerprint of the model's files.
        quantization: How.
    """
    if not plain:
        return ""
    return hashlib.blake2b(f"{plain}\0{quantization}".encode(), digest_size=16, person=b"kv1-rounded").hexdigest()


def _paths(files: ModelFiles) -> list[Path]:
    """Return the files that a model's outputs depend on, in an order that does not depend on their directory."""
    folder, options = Path(files.name), files.options
    if "gguf_file" in options:
        return [folder / options["gguf_file"]]
    if not folder.is_dir():
        from transformers.utils import cached_file

        found = cached_file(files.name, "config.json", revision=options.get("revision"), local_files_only=True)
        folder = Path(str(found)).parent
    code = sorted(folder.glob("*.py")) if files.source.trust_remote_code else []
    return [folder / "config.json", *code, *sorted(folder.glob("*.safetensors"))]


def _take_file(digest: blake2b, file: BinaryIO, path: Path) -> None:
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    if size <= _NUM_SAMPLES * _SAMPLE_BYTES:
        digest.update(file.read())
        return
    for k in range(_NUM_SAMPLES):
        file.seek((size - _SAMPLE_BYTES) * k // (_NUM_SAMPLES - 1))
        digest.update(file.read(_SAMPLE_BYTES))
    if path.suffix == ".safetensors":
        for middle, num_bytes in _middles(digest, file):
            file.seek(middle)
            digest.update(file.read(num_bytes))


def _middles(digest: blake2b, file: BinaryIO) -> Iterable[tuple[int, int]]:
    """Take the header, and return where the middle of each tensor is and how much of it to read, in the order of the file.

    Source: the format's documentation, huggingface/safetensors: 8 bytes of length, JSON, then tensors.
    """
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"a safetensors header of {length} bytes")
    header = file.read(length)
    digest.update(header)
    spans = sorted(entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__")
    for first, last in spans:
        num_bytes = min(last - first, _TENSOR_BYTES)
        yield 8 + length + (first + last - num_bytes) // 2, num_bytes
