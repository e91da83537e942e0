"""Our kernels as operators of torch, for graphs: a compiler cannot look into ctypes, so schemas declare results and side effects.

What a graph computes through them has the bits that the same shape has without it.
Norms, gates and rotations are operators as well: what torch.compile makes of them is no quicker, and takes longer to compile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

from trencadis_torch.attention.native import compiled_kernel
from trencadis_torch.attention.options import PACKED, AttentionOptions
from trencadis_torch.linear.heads import Heads, How
from trencadis_torch.linear.native import SOURCE, Native, Packed
from trencadis_torch.native_build import Source, load_library

__all__ = ["NAMESPACE", "GraphNative", "define", "graph_native", "kernel_attention"]

NAMESPACE: Final = "trencadis"

_PACKED: Final = (
    "Tensor weights, Tensor? scales, Tensor? bias, Tensor? levels, Tensor? order, "
    "int kind, int group, int zero, int num_outputs, int num_inputs"
)
"""The fields of packed weights."""

_SCHEMAS: Final = {
    "linear": f"(Tensor x, {_PACKED}) -> Tensor",
    "rows": f"(Tensor ids, {_PACKED}, float scale) -> Tensor",
    "rms_norm": "(Tensor x, Tensor weight, float eps) -> Tensor",
    "layer_norm": "(Tensor x, Tensor weight, Tensor? bias, float eps) -> Tensor",
    "gate": "(Tensor x, int activation) -> Tensor",
    "activate": "(Tensor x, int activation) -> Tensor",
    "rotate": (
        "(Tensor(a!) x, *, int num_heads, int num_kv_heads, int head_dim, Tensor? query_norm, Tensor? key_norm, float eps, "
        "int how, Tensor? cosines, Tensor? sines) -> ()"
    ),
    "attend": (
        "(Tensor query, Tensor new_keys, Tensor new_values, Tensor(a!) keys, Tensor(b!) values, Tensor tables, Tensor slots, "
        f"Tensor sequences, int window, {PACKED}) -> Tensor"
    ),
}


@functools.cache
def define() -> Any:
    """Define the operators at the first call; they stay as long as the process lives.

    Raises:
        BackendError: The libraries cannot be compiled.
    """
    native = _library()
    library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, kernel, shape in (
        ("linear", _linear, _linear_shape),
        ("rows", _rows, _rows_shape),
        ("rms_norm", native.rms_norm, _rms_norm_shape),
        ("layer_norm", native.layer_norm, _layer_norm_shape),
        ("gate", native.gate, _gate_shape),
        ("activate", native.activate, _activate_shape),
        ("rotate", _rotate, _rotate_shape),
        ("attend", _attend, _attend_shape),
    ):
        library.define(name + _SCHEMAS[name], tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, kernel, "CPU")
        torch.library.register_fake(f"{NAMESPACE}::{name}", shape, lib=library)
    return library


def _linear_shape(x: torch.Tensor, *fields: Any) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], Packed(*fields).num_outputs)


def _rows_shape(ids: torch.Tensor, *fields: Any) -> torch.Tensor:
    return ids.new_empty(*ids.shape, Packed(*fields[:-1]).num_inputs, dtype=torch.float32)


def _rms_norm_shape(x: torch.Tensor, _: Any, __: float) -> torch.Tensor:
    return x.new_empty(x.shape)


def _layer_norm_shape(x: torch.Tensor, _: Any, __: Any, ___: float) -> torch.Tensor:
    return x.new_empty(x.shape)


def _activate_shape(x: torch.Tensor, _: int) -> torch.Tensor:
    return x.new_empty(x.shape)


def _gate_shape(x: torch.Tensor, _: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _rotate_shape(x: torch.Tensor, **_: Any) -> None:
    """Nothing is returned: ``x`` is written to."""


def _attend_shape(query: torch.Tensor, _: Any, new_values: torch.Tensor, *__: Any) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], new_values.shape[2])


def _linear(x: torch.Tensor, *fields: Any) -> torch.Tensor:
    return _library().linear(x, Packed(*fields))


def _rows(ids: torch.Tensor, *fields: Any) -> torch.Tensor:
    return _library().rows(ids, Packed(*fields[:-1]), fields[-1])


def _rotate(
    x: torch.Tensor, *, how: int, cosines: torch.Tensor | None, sines: torch.Tensor | None, **heads: Any
) -> None:
    angles = None if cosines is None or sines is None else (cosines, sines)
    _library().rotate(x, Heads(how=How(how), **heads), angles)


def _attend(
    query: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    sequences: torch.Tensor,
    window: int,
    numbers: list[float],
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    return compiled_kernel(frozenset({keys.dtype})).attend(
        query,
        new_keys,
        new_values,
        (keys, values),
        tables=tables,
        slots=slots,
        sequences=sequences,
        window=window,
        options=AttentionOptions.unpacked(numbers, sinks),
    )


def kernel_attention(query: torch.Tensor, *arguments: Any, options: AttentionOptions) -> torch.Tensor:
    """Store new keys and values of one layer and attend, in a graph or not; see ``NativeAttention.attend``.

    Args:
        query: ``[T, H, D]``.
        arguments: New keys, new values, the cache's keys, its values, tables, slots, sequences, window.
        options: Options of the layer.
    """
    compiling = torch.compiler.is_compiling()
    attend: Callable[..., torch.Tensor] = functools.partial(_op, "attend") if compiling else _attend
    return attend(query, *arguments, *options.packed(query.shape[-1]))


class GraphNative(Native):
    """The library of :mod:`trencadis_torch.linear.native`, which graphs can call, too; eager code calls it as directly as ever."""

    def linear(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """Run the operator of this name in ``Native``."""
        return _op("linear", x, *packed) if torch.compiler.is_compiling() else super().linear(x, packed)

    def rows(self, ids: torch.Tensor, packed: Packed, scale: float) -> torch.Tensor:
        """Run the operator of this name in ``Native``."""
        return _op("rows", ids, *packed, scale) if torch.compiler.is_compiling() else super().rows(ids, packed, scale)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Run the operator of this name in ``Native``."""
        if torch.compiler.is_compiling():
            return _op("rms_norm", x, weight, eps)
        return super().rms_norm(x, weight, eps)

    def gate(self, x: torch.Tensor, activation: int) -> torch.Tensor:
        """Run the operator of this name in ``Native``."""
        return _op("gate", x, activation) if torch.compiler.is_compiling() else super().gate(x, activation)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        """Run the operator of this name in ``Native``."""
        if torch.compiler.is_compiling():
            return _op("layer_norm", x, weight, bias, eps)
        return super().layer_norm(x, weight, bias, eps)

    def activate(self, x: torch.Tensor, activation: int) -> torch.Tensor:
        """Run the operator of this name in ``Native``."""
        return _op("activate", x, activation) if torch.compiler.is_compiling() else super().activate(x, activation)

    def rotate(self, x: torch.Tensor, heads: Heads, angles: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Run the operator of this name in ``Native``."""
        if not torch.compiler.is_compiling():
            super().rotate(x, heads, angles)
            return
        cosines, sines = (None, None) if angles is None else angles
        _op(
            "rotate",
            x,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            query_norm=heads.query_norm,
            key_norm=heads.key_norm,
            eps=heads.eps,
            how=int(heads.how),
            cosines=cosines,
            sines=sines,
        )


def _op(name: str, *arguments: Any, **options: Any) -> torch.Tensor:
    result: torch.Tensor = getattr(getattr(torch.ops, NAMESPACE), name)(*arguments, **options)
    return result


@functools.cache
def _library() -> Native:
    """Return the library for operators, which need not ask where they are."""
    return Native(load_library(Source(SOURCE)))


@functools.cache
def graph_native() -> GraphNative:
    """Return the library.

    Raises:
        BackendError: It cannot be compiled.
    """
    return GraphNative(load_library(Source(SOURCE)))
