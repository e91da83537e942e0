"""Rotary embeddings of a model in the vendor's kernel.

transformers' attention modules call a function of their file, ``apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)``. It varies from
family to family: rotation of halves or of neighbours, whole or half tables, partial embeddings, wider types. If a module's function
equals the kernel with some preparation, to the last bit, the module gets a subclass whose forward calls another function
under that name; other models of the process keep theirs.

Shapes: B sequences, H heads, T tokens, D dimensions of a head, R of them rotated.
"""

from __future__ import annotations

import inspect
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, Literal

import attrs
import torch

from trencadis_gaudi.fused.agreement import drawn, why_wrong
from trencadis_gaudi.fused.meanings import rotary_blockwise, rotary_pairwise
from trencadis_gaudi.kernels import ROTARY, Mode, RotaryKernel, refuse

__all__ = ["RotaryKind", "fuse_rotary", "kind_of"]

Tables = Literal["whole", "half", "repeated"]
Types = Literal["given", "restored", "wide"]

_FUNCTION = "apply_rotary_pos_emb"


_MEANINGS: Mapping[Mode, RotaryKernel] = {"BLOCKWISE": rotary_blockwise, "PAIRWISE": rotary_pairwise}


@attrs.frozen
class RotaryKind:
    """Rotary embedding expressed by the kernel with conversions before and after it.

    Attributes:
        mode: Mode of the kernel.
        tables: Conversion of tables. ``whole``: none; ``half``: one entry per angle, concatenated twice; ``repeated``: each entry
            of the first half twice.
        types: Number types. ``given``: those of the inputs; ``restored``: the result has the input's type; ``wide``: the same,
            computed in float32.
    """

    mode: Mode
    tables: Tables
    types: Types

    def function(self, kernel: RotaryKernel, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement of transformers' function.

        Args:
            kernel: Kernel in this mode.
            original: Function of transformers, called for other values of ``unsqueeze_dim``.
        """

        def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
            if unsqueeze_dim != 1:
                return original(q, k, cos, sin, unsqueeze_dim)
            cos, sin = self._table(cos), self._table(sin)
            return self._rotated(kernel, q, cos, sin), self._rotated(kernel, k, cos, sin)

        return apply_rotary_pos_emb

    def _table(self, table: torch.Tensor) -> torch.Tensor:
        """Return a table ``[B, T, R]`` or ``[B, T, R / 2]`` as ``[T, B, 1, R]``."""
        if self.tables == "half":
            table = torch.cat([table, table], dim=-1)
        elif self.tables == "repeated":
            table = table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1)
        return table.transpose(0, 1).unsqueeze(2)

    def _rotated(self, kernel: RotaryKernel, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return queries or keys ``[B, H, T, D]``, rotated."""
        first = x.permute(2, 0, 1, 3)
        if self.types == "wide":
            first = first.float()
        size = cos.shape[-1]
        if size == x.shape[-1]:
            result = kernel(first, cos, sin)
        else:
            result = torch.cat([kernel(first[..., :size], cos, sin), first[..., size:]], dim=-1)
        if self.types != "given":
            result = result.to(x.dtype)
        return result.permute(1, 2, 0, 3)


_TABLES: tuple[Tables, ...] = ("whole", "half", "repeated")
_TYPES: tuple[Types, ...] = ("given", "restored", "wide")
_KINDS = tuple(RotaryKind(*kind) for kind in product(_MEANINGS, _TABLES, _TYPES))


@torch.no_grad()
def fuse_rotary(model: Any, kernels: Mapping[Mode, RotaryKernel], device: torch.device) -> Counter[tuple[str, Mode]]:
    """Replace a model's rotary embeddings by the kernel where it agrees; return the number of modules by class and mode.

    Args:
        model: Model on the CPU.
        kernels: Vendor's kernel by mode.
        device: Device of the kernels.
    """
    classes: dict[type, tuple[type, Mode] | None] = {}
    served: Counter[tuple[str, Mode]] = Counter()
    wrong: dict[Mode, str | None] = {}
    for module in model.modules():
        cls = type(module)
        if cls not in classes:
            classes[cls] = None
            original = _function_of(cls)
            kind = None if original is None else kind_of(original)
            if original is None or kind is None:
                continue
            if kind.mode not in wrong:
                why = wrong[kind.mode] = _why_wrong(kernels[kind.mode], kind.mode, model.dtype, device)
                if why:
                    refuse(ROTARY, f"in the mode {kind.mode} {why}")
            if not wrong[kind.mode]:
                classes[cls] = _with_function(cls, kind.function(kernels[kind.mode], original)), kind.mode
        if (found := classes[cls]) is not None:
            module.__class__ = found[0]
            served[cls.__name__, found[1]] += 1
    return served


def kind_of(function: Callable[..., Any]) -> RotaryKind | None:
    """Return the kind that equals a rotary embedding to the last bit, in types of 32 and 16 bits; None if no kind does.

    Args:
        function: Function with the signature of transformers' ``apply_rotary_pos_emb``.
    """
    expected = [(trial, result) for trial in _trials() if (result := _result(function, trial)) is not None]
    if not expected:
        return None
    for kind in _KINDS:
        candidate = kind.function(_MEANINGS[kind.mode], function)
        if all(_is_same(_result(candidate, trial), result) for trial, result in expected):
            return kind
    return None


def _trials() -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield queries, keys and tables: tables as wide as a head and half as wide, in the model's type and in float32."""
    for size, (dtype, of_tables) in product(
        (8, 4), ((torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32))
    ):
        queries, keys = (drawn(2, heads, 5, 8, seed=heads, dtype=dtype) for heads in (4, 2))
        yield queries, keys, *(drawn(2, 5, size, seed=seed, dtype=of_tables) for seed in (6, 7))


def _result(function: Callable[..., Any], trial: tuple[torch.Tensor, ...]) -> Any:
    """Return rotated queries and keys; None if the function does not accept the shapes."""
    try:
        return function(*trial)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None


def _is_same(found: Any, expected: Any) -> bool:
    return (
        found is not None
        and len(found) == len(expected)
        and all(
            one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(found, expected, strict=True)
        )
    )


def _why_wrong(kernel: RotaryKernel, mode: Mode, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why a kernel is wrong in a mode, or None; angles are repeated as the mode requires, since a kernel may read one of a pair."""
    x, angles = drawn(5, 1, 2, 64, dtype=dtype), drawn(5, 1, 1, 32, seed=1)
    angles = torch.cat([angles, angles], -1) if mode == "BLOCKWISE" else angles.repeat_interleave(2, -1)
    return why_wrong(kernel, _MEANINGS[mode], [(x, angles.cos().to(dtype), angles.sin().to(dtype))], device)


def _function_of(cls: type) -> Callable[..., Any] | None:
    """Return the rotary embedding function that a module's forward calls by name, or None."""
    forward: Any = inspect.unwrap(cls.forward) if hasattr(cls, "forward") else None
    if not isinstance(forward, types.FunctionType) or _FUNCTION not in forward.__code__.co_names:
        return None
    function = forward.__globals__.get(_FUNCTION)
    return function if callable(function) else None


def _with_function(cls: Any, function: Callable[..., Any]) -> type:
    """Return a subclass whose forward calls another rotary embedding function."""
    forward = inspect.unwrap(cls.forward)
    scope = {**forward.__globals__, _FUNCTION: function}
    # torch.compile would use this name to find the module with the original function.
    del scope["__name__"]
    own = types.FunctionType(forward.__code__, scope, "forward", forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    return type(cls.__name__, (cls,), {"forward": own, "__module__": cls.__module__})
