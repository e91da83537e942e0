"""What a ``.gguf`` file says of itself: metadata and where its tensors are. Read once for each process, from a mapping of the file.

    magic, version, counts ▶ metadata: key, kind, value ▶ tensors: name, shape, kind, place ▶ padding ▶ data

A string list of a tokenizer has some 10⁵ to 10⁶ elements: of it the place is kept, and it is read each time that it is asked for.

Source: the format's specification, ggml-org/ggml ``docs/gguf.md``; sizes of blocks, ``gguf.constants.GGML_QUANT_SIZES``.
"""

from __future__ import annotations

import functools
import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import attrs
import numpy as np

from trencadis.errors import ModelLoadError

__all__ = [
    "KINDS",
    "ROTARY_FREQUENCIES",
    "ROTARY_LONG",
    "ROTARY_SHORT",
    "ROTARY_TENSORS",
    "GgufFile",
    "GgufTensor",
    "StringList",
    "TensorKind",
    "read_gguf",
]

ROTARY_FREQUENCIES: Final = "rope_freqs.weight"
ROTARY_LONG: Final = "rope_factors_long.weight"
ROTARY_SHORT: Final = "rope_factors_short.weight"
ROTARY_TENSORS: Final = frozenset((ROTARY_FREQUENCIES, ROTARY_LONG, ROTARY_SHORT))
"""Tensors that are settings of rotary embeddings, and no weights."""


@attrs.frozen
class TensorKind:
    """How elements of a tensor are stored.

    Attributes:
        name: Such as ``Q4_K``.
        block: Elements that are stored together.
        num_bytes: Size of a block.
    """

    name: str
    block: int
    num_bytes: int


KINDS: Final[Mapping[int, TensorKind]] = {
    0: TensorKind("F32", 1, 4),
    1: TensorKind("F16", 1, 2),
    2: TensorKind("Q4_0", 32, 18),
    3: TensorKind("Q4_1", 32, 20),
    6: TensorKind("Q5_0", 32, 22),
    7: TensorKind("Q5_1", 32, 24),
    8: TensorKind("Q8_0", 32, 34),
    9: TensorKind("Q8_1", 32, 40),
    10: TensorKind("Q2_K", 256, 84),
    11: TensorKind("Q3_K", 256, 110),
    12: TensorKind("Q4_K", 256, 144),
    13: TensorKind("Q5_K", 256, 176),
    14: TensorKind("Q6_K", 256, 210),
    15: TensorKind("Q8_K", 256, 292),
    16: TensorKind("IQ2_XXS", 256, 66),
    17: TensorKind("IQ2_XS", 256, 74),
    18: TensorKind("IQ3_XXS", 256, 98),
    19: TensorKind("IQ1_S", 256, 50),
    20: TensorKind("IQ4_NL", 32, 18),
    21: TensorKind("IQ3_S", 256, 110),
    22: TensorKind("IQ2_S", 256, 82),
    23: TensorKind("IQ4_XS", 256, 136),
    24: TensorKind("I8", 1, 1),
    25: TensorKind("I16", 1, 2),
    26: TensorKind("I32", 1, 4),
    27: TensorKind("I64", 1, 8),
    28: TensorKind("F64", 1, 8),
    29: TensorKind("IQ1_M", 256, 56),
    30: TensorKind("BF16", 1, 2),
    34: TensorKind("TQ1_0", 256, 54),
    35: TensorKind("TQ2_0", 256, 66),
    39: TensorKind("MXFP4", 32, 17),
}
"""Kinds by their number in files."""

_SCALARS: Final[Mapping[int, struct.Struct]] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
"""Numbers in metadata by their kind; the two other kinds are text and list."""

_TEXT: Final = 8
_LIST: Final = 9
_LENGTH: Final = struct.Struct("<Q")
_VERSIONS: Final = (2, 3)
_ALIGNMENT: Final = 32
"""Where ``general.alignment`` is not given."""

_MAX_DIMENSIONS: Final = 8


@attrs.frozen
class GgufTensor:
    """Where a tensor lies and how it is stored.

    Attributes:
        shape: Outermost dimension first, as of PyTorch; the file has them the other way round.
        kind: How its elements are stored.
        offset: Place of its first byte, from the file's begin.
    """

    shape: tuple[int, ...]
    kind: TensorKind
    offset: int

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) // self.kind.block * self.kind.num_bytes


@attrs.frozen
class StringList:
    """The place of a list of texts in a file; :meth:`GgufFile.strings` reads it.

    Attributes:
        start: Place of its first element's length, bytes from the file's begin.
        count: Number of elements.
    """

    start: int
    count: int


@attrs.frozen(eq=False)
class GgufFile:
    """A file's description of itself.

    Attributes:
        path: The file.
        mapped: Bytes of the file; copied on writing, so that views may be written to and the file stays as it is.
        metadata: Values by key: numbers, texts, arrays of numpy, and places of lists of texts.
        tensors: By the file's names for them.
    """

    path: Path
    mapped: mmap.mmap = attrs.field(repr=False)
    metadata: Mapping[str, Any] = attrs.field(repr=False)
    tensors: Mapping[str, GgufTensor] = attrs.field(repr=False)

    @property
    def architecture(self) -> str:
        """The family of the model, such as ``gemma3``."""
        return str(self.metadata["general.architecture"])

    def strings(self, key: str) -> list[str]:
        """Return a list of texts; empty where the file has none of that name.

        Raises:
            ModelLoadError: A text is no UTF-8.
        """
        found = self.metadata.get(key)
        if not isinstance(found, StringList):
            return []
        texts, view, at = [], memoryview(self.mapped), found.start
        length_at = _LENGTH.unpack_from
        try:
            for _ in range(found.count):
                begin = at + 8
                at = begin + length_at(view, at)[0]
                texts.append(str(view[begin:at], "utf-8"))
        except UnicodeDecodeError as error:
            raise ModelLoadError(f"{self.path}: {key}: element {len(texts)} is no UTF-8: {error}.") from error
        return texts


def read_gguf(path: str | Path) -> GgufFile:
    """Return a file's description; the same one for as long as the file is not changed.

    Raises:
        ModelLoadError: It is no GGUF file, or it is cut off, or it has what is not known; in words.
    """
    place = Path(path).resolve()
    try:
        found = place.stat()
        return _read(place, found.st_size, found.st_mtime_ns)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}.") from error


@functools.lru_cache(maxsize=4)
def _read(path: Path, size: int, changed_ns: int) -> GgufFile:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelLoadError(f"{path}: does not begin with GGUF: it is no .gguf file.")
        return _Reader(path, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)).read()


class _Reader:
    """Reads a file from its begin to where the data of tensors begins."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self._path, self._mapped, self._at = path, mapped, 4

    def read(self) -> GgufFile:
        version = self._number(4)
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = "big-endian" if swapped in _VERSIONS else f"version {version}"
            self._fail(f"it is {kind}; little-endian files of version 2 and 3 are read")
        num_tensors, num_keys = self._number(10), self._number(10)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._text()
            metadata[key] = self._value(self._number(4), key)
        if not isinstance(metadata.get("general.architecture"), str):
            self._fail("its metadata has no general.architecture")
        tensors: dict[str, GgufTensor] = {}
        for _ in range(num_tensors):
            name = self._text()
            if name in tensors:
                self._fail(f"two tensors have the name {name}")
            tensors[name] = self._tensor(name)
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            self._fail(f"general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        placed = {name: attrs.evolve(tensor, offset=start + tensor.offset) for name, tensor in tensors.items()}
        self._check_within(placed)
        return GgufFile(self._path, self._mapped, metadata, placed)

    def _check_within(self, tensors: Mapping[str, GgufTensor]) -> None:
        beyond = [name for name, one in tensors.items() if one.offset + one.num_bytes > len(self._mapped)]
        if beyond:
            last = max(one.offset + one.num_bytes for one in tensors.values())
            self._fail(
                f"it is cut off: it has {len(self._mapped)} bytes of {last}, and {len(beyond)} of {len(tensors)} tensors lie beyond its "
                f"end, {beyond[0]} for one; fetch it again"
            )

    def _tensor(self, name: str) -> GgufTensor:
        num_dimensions = self._number(4)
        if num_dimensions > _MAX_DIMENSIONS:
            self._fail(f"{name} has {num_dimensions} dimensions")
        shape = tuple(self._number(10) for _ in range(num_dimensions))[::-1]
        number, offset = self._number(4), self._number(10)
        kind = KINDS.get(number)
        if kind is None:
            self._fail(f"{name} is of kind {number}, which is not known")
        if (shape[-1] if shape else 1) % kind.block:
            self._fail(
                f"{name} of shape {list(shape)} has rows that are no whole blocks of {kind.block} of {kind.name}"
            )
        return GgufTensor(shape, kind, offset)

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._number(kind)
        if kind == _TEXT:
            return self._text()
        if kind != _LIST:
            self._fail(f"{key} is of kind {kind}, which is not known")
        element, count = self._number(4), self._number(10)
        if element == _TEXT:
            return self._place(count)
        if element not in _SCALARS:
            self._fail(f"{key} is a list of kind {element}, which is not known")
        form = _SCALARS[element]
        start = self._take(count * form.size)
        return np.frombuffer(self._mapped, dtype=np.dtype(form.format), count=count, offset=start)

    def _place(self, count: int) -> StringList:
        start = at = self._at
        size, view = len(self._mapped), memoryview(self._mapped)
        length_at = _LENGTH.unpack_from
        for _ in range(count):
            if at + 8 > size:
                self._fail_cut_off()
            at += 8 + length_at(view, at)[0]
        self._take(at - start)
        return StringList(start, count)

    def _number(self, kind: int) -> Any:
        form = _SCALARS[kind]
        return form.unpack_from(self._mapped, self._take(form.size))[0]

    def _text(self) -> str:
        length = self._number(10)
        start = self._take(length)
        try:
            return self._mapped[start : start + length].decode()
        except UnicodeDecodeError as error:
            self._fail(f"a name or text at byte {start} is no UTF-8: {error}")

    def _take(self, num_bytes: int) -> int:
        """Return where the next bytes begin, and go past them."""
        start = self._at
        if start + num_bytes > len(self._mapped):
            self._fail_cut_off()
        self._at += num_bytes
        return start

    def _fail_cut_off(self) -> NoReturn:
        self._fail(f"it is cut off: it ends after {len(self._mapped)} bytes, within its metadata; fetch it again")

    def _fail(self, reason: str) -> NoReturn:
        raise ModelLoadError(f"{self._path}: {reason}.")
