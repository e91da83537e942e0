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
from trencadis_torch.linear.native import SOURCE, Native
from trencadis_torch.native_build import Source, load_library

__all__ = ["NAMESPACE", "GraphNative", "define", "graph_native", "kernel_attention"]

NAMESPACE: Final = "trencadis"

_SCHEMAS: Final = {
    "linear_float": "(Tensor x, Tensor weights, Tensor? bias, int num_outputs) -> Tensor",
    "linear_int8": "(Tensor x, Tensor weights, Tensor scales, Tensor sums, Tensor? bias, int num_outputs) -> Tensor",
    "rows_float": "(Tensor ids, Tensor weights, int num_rows, int size, float scale) -> Tensor",
    "rows_int8": "(Tensor ids, Tensor weights, Tensor scales, int num_rows, int size, float scale) -> Tensor",
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
        ("linear_float", native.linear_float, _linear_float_shape),
        ("linear_int8", native.linear_int8, _linear_int8_shape),
        ("rows_float", _rows_float, _rows_float_shape),
        ("rows_int8", _rows_int8, _rows_int8_shape),
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


def _linear_float_shape(x: torch.Tensor, _: Any, __: Any, num_outputs: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], num_outputs)


def _linear_int8_shape(x: torch.Tensor, _: Any, __: Any, ___: Any, ____: Any, num_outputs: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], num_outputs)


def _rows_float_shape(ids: torch.Tensor, _: Any, __: int, size: int, ___: float) -> torch.Tensor:
    return ids.new_empty(*ids.shape, size, dtype=torch.float32)


def _rows_int8_shape(ids: torch.Tensor, _: Any, __: Any, ___: int, size: int, ____: float) -> torch.Tensor:
    return ids.new_empty(*ids.shape, size, dtype=torch.float32)


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


def _rows_float(ids: torch.Tensor, weights: torch.Tensor, num_rows: int, size: int, scale: float) -> torch.Tensor:
    return _library().rows_float(ids, weights, (num_rows, size), scale)


def _rows_int8(
    ids: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor, num_rows: int, size: int, scale: float
) -> torch.Tensor:
    return _library().rows_int8(ids, weights, scales, (num_rows, size), scale)


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
        options: Of the layer.
    """
    compiling = torch.compiler.is_compiling()
    attend: Callable[..., torch.Tensor] = functools.partial(_op, "attend") if compiling else _attend
    return attend(query, *arguments, *options.packed(query.shape[-1]))


class GraphNative(Native):
    """The library of :mod:`trencadis_torch.linear.native`, which graphs can call, too; eager code calls it as directly as ever."""

    def linear_float(
        self, x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, num_outputs: int
    ) -> torch.Tensor:
        """As in ``Native``."""
        if torch.compiler.is_compiling():
            return _op("linear_float", x, weights, bias, num_outputs)
        return super().linear_float(x, weights, bias, num_outputs)

    def linear_int8(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        scales: torch.Tensor,
        sums: torch.Tensor,
        bias: torch.Tensor | None,
        num_outputs: int,
    ) -> torch.Tensor:
        """As in ``Native``."""
        if torch.compiler.is_compiling():
            return _op("linear_int8", x, weights, scales, sums, bias, num_outputs)
        return super().linear_int8(x, weights, scales, sums, bias, num_outputs)

    def rows_float(
        self, ids: torch.Tensor, weights: torch.Tensor, shape: tuple[int, int], scale: float
    ) -> torch.Tensor:
        """As in ``Native``."""
        if torch.compiler.is_compiling():
            return _op("rows_float", ids, weights, *shape, scale)
        return super().rows_float(ids, weights, shape, scale)

    def rows_int8(
        self, ids: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int], scale: float
    ) -> torch.Tensor:
        """As in ``Native``."""
        if torch.compiler.is_compiling():
            return _op("rows_int8", ids, weights, scales, *shape, scale)
        return super().rows_int8(ids, weights, scales, shape, scale)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """As in ``Native``."""
        if torch.compiler.is_compiling():
            return _op("rms_norm", x, weight, eps)
        return super().rms_norm(x, weight, eps)

    def gate(self, x: torch.Tensor, activation: int) -> torch.Tensor:
        """As in ``Native``."""
        return _op("gate", x, activation) if torch.compiler.is_compiling() else super().gate(x, activation)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        """As in ``Native``."""
        if torch.compiler.is_compiling():
            return _op("layer_norm", x, weight, bias, eps)
        return super().layer_norm(x, weight, bias, eps)

    def activate(self, x: torch.Tensor, activation: int) -> torch.Tensor:
        """As in ``Native``."""
        return _op("activate", x, activation) if torch.compiler.is_compiling() else super().activate(x, activation)

    def rotate(self, x: torch.Tensor, heads: Heads, angles: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """As in ``Native``."""
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
