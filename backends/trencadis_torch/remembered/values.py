"""Objects of a loaded decoder as plain data, and back: JSON for what they are, one run of bytes for all tensors.

    objects ─▶ Writer ─▶ {"PackedLinear": {...}}, tensors by number ─▶ Reader ─▶ objects whose tensors lie in the bytes that are given

Only classes that are listed here are written and made; a name in a file chooses among them and reaches no import. Structures that the
kernels read are written field by field, an address as the number of the tensor that lies there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, Final

import attrs
import torch
from torch import nn

from trencadis.records import ModelFacts
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.cache.kv_cache import AttentionLayer
from trencadis_torch.linear.angles import Angles, Frequencies
from trencadis_torch.linear.decoder import FusedDecoder, LayerAttention
from trencadis_torch.linear.experts import Activated, FusedMixture, Grouping, PackedExperts, Routing, Score
from trencadis_torch.linear.fused import FusedMLP, FusedNorm, RotaryAttention
from trencadis_torch.linear.heads import Heads, How
from trencadis_torch.linear.native import Mixture, Native, Packed, Product
from trencadis_torch.linear.native_decoder import Decoder, Layer, NativeDecoder, Norm
from trencadis_torch.linear.packed import PackedLinear, RowsEmbedding
from trencadis_torch.linear.replacement import Replacement
from trencadis_torch.linear.scaling import StepScales
from trencadis_torch.linear.structure import Ending

__all__ = ["ALIGNED", "MODULES", "NotPlainError", "Place", "Reader", "Writer"]

ALIGNED: Final = 64
"""Bytes at whose multiples tensors begin: a line of the processor's cache."""

MODULES: Final = (FusedMLP, FusedMixture, FusedNorm, PackedExperts, PackedLinear, RotaryAttention, RowsEmbedding)
"""Modules that stand for a model's own."""

_RECORDS: Final = (
    *(
        Activated,
        Angles,
        AttentionLayer,
        AttentionOptions,
        Ending,
        Frequencies,
        FusedDecoder,
        Grouping,
        Heads,
        LayerAttention,
    ),
    *(ModelFacts, Packed, Replacement, Routing, StepScales),
)
_STRUCTURES: Final = (Decoder, Layer, Mixture, Norm, Product)
_ENUMS: Final = (How, Score)
_LIBRARIES: Final = (Native, NativeDecoder)
_CLASSES: Final[Mapping[str, Any]] = {
    kind.__name__: kind for kind in (*MODULES, *_RECORDS, *_STRUCTURES, *_ENUMS, *_LIBRARIES)
}
_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.bool,
    )
}
_COUNTS: Final = {"layers": "num_layers"}
"""Fields of structures that point at several others, and the fields that say how many these are."""

_BARE: Final = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"}
"""What a module has without anything of its own."""


class NotPlainError(Exception):
    """Something cannot be written, or is not what was written; says what."""


@attrs.frozen
class Place:
    """Where a tensor lies.

    Attributes:
        at: First byte.
        dtype: Name.
        shape: Shape of the tensor.
    """

    at: int
    dtype: str
    shape: tuple[int, ...]


class Writer:
    """Turns objects into plain data.

    Attributes:
        places: Places of the tensors so far.
        size: Bytes that they take.
    """

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.size = 0
        self._tensors: list[torch.Tensor] = []
        self._known: dict[tuple[int, torch.Size, torch.dtype], int] = {}
        self._at: dict[int, int] = {}

    def plain(self, value: Any) -> Any:
        """Return a value in plain data; its tensors are noted.

        Raises:
            NotPlainError: There is something in it of which nothing is known here.
        """
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, torch.Tensor):
            kind = "parameter" if isinstance(value, nn.Parameter) else "tensor"
            return {kind: self._number(value.detach())}
        if type(value) is list:
            return [self.plain(one) for one in value]
        if type(value) in (dict, tuple, frozenset):
            named = value.items() if isinstance(value, dict) else enumerate(value)
            parts = [[self.plain(name), self.plain(one)] for name, one in named]
            return {type(value).__name__: parts if isinstance(value, dict) else [one for _, one in parts]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        name = type(value).__name__
        if _CLASSES.get(name) is not type(value):
            raise NotPlainError(f"it has something of type {name}")
        return {name: self._fields(value)}

    def note(self, value: Any) -> None:
        """Note a tensor, so that structures may point at it."""
        self._number(value.detach())

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield for each tensor where it begins, and its bytes, uint8."""
        for place, tensor in zip(self.places, self._tensors, strict=True):
            yield place.at, tensor.contiguous().flatten().view(torch.uint8)

    def _number(self, tensor: torch.Tensor) -> int:
        key = (tensor.data_ptr(), tensor.shape, tensor.dtype)
        if key not in self._known or not tensor.numel():
            name = str(tensor.dtype).removeprefix("torch.")
            if name not in _DTYPES or not tensor.is_contiguous() or tensor.device.type != "cpu":
                raise NotPlainError(f"it has a tensor of {name} on {tensor.device} with strides {tensor.stride()}")
            self._known[key] = self._at[tensor.data_ptr()] = len(self.places)
            self.places.append(Place(self.size, name, tuple(tensor.shape)))
            self._tensors.append(tensor)
            self.size += -(-tensor.nbytes // ALIGNED) * ALIGNED
        return self._known[key]

    def _fields(self, value: Any) -> Any:
        if isinstance(value, ctypes.Structure):
            return self._structure(value)
        if isinstance(value, Enum):
            return value.value
        if isinstance(value, _LIBRARIES):
            return None
        if isinstance(value, nn.Module):
            left_out = _BARE | set(getattr(value, "OF_ORIGINAL", ()))
            found: dict[str, Any] = {name: one for name, one in vars(value).items() if name not in left_out}
        elif isinstance(value, tuple):
            found = dict(zip(type(value)._fields, value, strict=True))  # type: ignore[attr-defined]
        else:
            found = {field.name: getattr(value, field.name) for field in attrs.fields(type(value)) if field.init}
        return {name: self.plain(one) for name, one in found.items()}

    def _structure(self, value: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, kind, *_ in value._fields_:
            one = getattr(value, name)
            if kind is ctypes.c_void_p:
                if one is not None and one not in self._at:
                    raise NotPlainError(f"{name} of {type(value).__name__} is at an address of no tensor that is known")
                found[name] = None if one is None else self._at[one]
            elif isinstance(one, ctypes.Structure):
                found[name] = self._structure(one)
            elif _is_pointer(kind):
                count = (getattr(value, _COUNTS[name]) if name in _COUNTS else 1) if one else 0
                found[name] = [self._structure(one[index]) for index in range(count)]
            else:
                found[name] = one
        return found


class Reader:
    """Makes objects of plain data.

    Args:
        places: Places of the tensors.
        content: Bytes that they lie in, uint8; they must outlive the objects.
        libraries: Libraries of this process, by the names of their classes.
    """

    def __init__(self, places: list[Place], content: torch.Tensor, libraries: Mapping[str, Any]) -> None:
        self._tensors = [_view(place, content) for place in places]
        self._libraries = libraries

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors."""
        return self._tensors

    def value(self, plain: Any) -> Any:
        """Return what plain data says.

        Raises:
            NotPlainError: It is not what :class:`Writer` gives.
        """
        if isinstance(plain, list):
            return [self.value(one) for one in plain]
        if not isinstance(plain, dict):
            return plain
        ((name, fields),) = plain.items()
        if name in _BUILTIN:
            return _BUILTIN[name](self, fields)
        kind = _CLASSES.get(name)
        if kind is None:
            raise NotPlainError(f"{name} is no class that is written")
        return self._libraries[name] if kind in _LIBRARIES else self._made(kind, fields)

    def _made(self, kind: Any, fields: Any) -> Any:
        if issubclass(kind, ctypes.Structure):
            return self._structure(kind, fields)
        if issubclass(kind, Enum):
            return kind(fields)
        values = {name: self.value(one) for name, one in fields.items()}
        if issubclass(kind, nn.Module):
            made = kind.__new__(kind)
            nn.Module.__init__(made)
            vars(made).update(values)
            return made.eval()
        return kind(**values)

    def _structure(self, kind: Any, fields: Mapping[str, Any]) -> Any:
        made = kind()
        for name, of, *_ in kind._fields_:
            one = fields[name]
            if of is ctypes.c_void_p:
                one = None if one is None else self._tensors[one].data_ptr()
            elif isinstance(one, dict):
                one = self._structure(of, one)
            elif _is_pointer(of):
                parts = [self._structure(of._type_, part) for part in one]
                one = (of._type_ * len(parts))(*parts) if parts else None
            setattr(made, name, one)
        return made


_BUILTIN: Final[Mapping[str, Callable[[Reader, Any], Any]]] = {
    "tensor": lambda reader, number: reader.tensors[number],
    "parameter": lambda reader, number: nn.Parameter(reader.tensors[number], requires_grad=False),
    "dict": lambda reader, parts: {reader.value(name): reader.value(one) for name, one in parts},
    "tuple": lambda reader, parts: tuple(map(reader.value, parts)),
    "frozenset": lambda reader, parts: frozenset(map(reader.value, parts)),
    "dtype": lambda _, name: _DTYPES[name],
}


def _is_pointer(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, ctypes._Pointer)  # noqa: SLF001 - the class of typed pointers


def _view(place: Place, content: torch.Tensor) -> torch.Tensor:
    dtype = _DTYPES[place.dtype]
    size = dtype.itemsize
    for length in place.shape:
        size *= length
    return content[place.at : place.at + size].view(dtype).view(place.shape)
