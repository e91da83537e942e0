"""``linear.cpp`` from Python: tensors in, tensors out. float32 on the CPU; every call runs in the threads that torch would use."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from trencadis.errors import BackendError, ModelLoadError
from trencadis_torch.linear.heads import Heads
from trencadis_torch.native_build import Source, load_library

__all__ = [
    "ACTIVATIONS",
    "KINDS",
    "SOURCE",
    "Mixture",
    "Native",
    "Packed",
    "Product",
    "check_quantization",
    "native",
    "product",
    "threads_for",
]

logger = logging.getLogger("trencadis.torch")

SOURCE: Final = Path(__file__).with_name("linear.cpp")

ACTIVATIONS: Final = {"silu": 0, "gelu_pytorch_tanh": 1, "gelu": 2, "relu2": 3, "relu": 4}
"""Names in transformers' configurations, and their numbers in the library."""

KINDS: Final = {
    name: number
    for number, name in enumerate(
        ("float", "bfloat", "float8_e4m3fn", "float8_e5m2", "channels", "groups8", "groups4", "levels4", "bfloat_pairs")
    )
}
"""Kinds of packed weights, see linear.h, and their numbers in the library."""

SMALL: Final = 1 << 18
"""Multiplications below which one thread is quicker than waking others."""

_INT, _AT, _FLOAT, _DOUBLE = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float, ctypes.c_double
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "packed_bytes": (_AT,),
    "pack_floats": (_AT, _AT, _INT, _INT, _AT),
    "pack_ints": (_AT, _AT, _AT, _AT, _INT, _INT, _AT),
    "linear": (_AT, _AT, _INT, _INT, _AT, _INT, _INT),
    "rows": (_AT, _AT, _INT, _FLOAT, _AT),
    "rms_norm": (_AT, _INT, _INT, _AT, _FLOAT, _AT, _INT),
    "layer_norm": (_AT, _INT, _INT, _AT, _AT, _FLOAT, _AT, _INT),
    "gate": (_AT, _INT, _INT, _INT, _AT, _INT),
    "activate": (_AT, _INT, _INT, _INT, _AT, _INT),
    "route": (_AT, _AT, _INT, _AT, _AT),
    "mix": (_AT, _AT, _INT, _AT, _AT, _AT, _INT),
    "add_beside": (_AT, _AT, _INT, _INT, _AT),
    "rotate": (_AT, _INT, _INT, _INT, _INT, _INT, _AT, _AT, _FLOAT, _INT, _AT, _AT, _INT, _INT),
}

_NUMBERS: Final = frozenset({"rows", "packed_bytes", "mix"})
"""Functions that return one."""


class Product(ctypes.Structure):
    """Mirrors ``Product`` of linear.h."""

    _fields_ = (
        *((name, _AT) for name in ("weights", "scales", "bias", "levels", "order")),
        *((name, _INT) for name in ("kind", "group", "zero", "num_outputs", "num_inputs")),
    )


class Mixture(ctypes.Structure):
    """Mirrors ``Mixture`` of experts.h."""

    _fields_ = (
        *((name, Product) for name in ("router", "gates", "values", "down", "beside")),
        ("correction", _AT),
        *((name, _INT) for name in ("num_experts", "num_chosen", "hidden_size", "inner_size")),
        *((name, _INT) for name in ("score", "normalises", "activation", "num_groups", "num_open", "num_best")),
        *((name, _DOUBLE) for name in ("scale", "alpha", "limit")),
    )


class Packed(NamedTuple):
    """A layer's weights as the library reads them.

    Attributes:
        weights: Panels, uint8.
        scales: float32 ``[N]``, padded to whole panels: factors of the outputs; None for floats of 16 and 32 bits.
        bias: float32 ``[N]``, or None.
        levels: The table of ``levels4``, uint8 ``[16]``; else None.
        order: Input of each column, int32 ``[K]``, where groups of integers are of inputs that lie apart; else None.
        kind: Number of a kind.
        group: Inputs that share a scale.
        zero: ``weight = scale · (value - zero)``; -1: groups have minimums instead.
        num_outputs: N.
        num_inputs: K.
    """

    weights: torch.Tensor
    scales: torch.Tensor | None
    bias: torch.Tensor | None
    levels: torch.Tensor | None
    order: torch.Tensor | None
    kind: int
    group: int
    zero: int
    num_outputs: int
    num_inputs: int


def product(packed: Packed) -> Product:
    """Return the library's view of packed weights, which must outlive it."""
    return Product(*(_address(part) if isinstance(part, torch.Tensor) else part for part in packed))


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class Native:
    """The library, loaded.

    Args:
        library: ``linear.cpp``, compiled.

    Attributes:
        panel: Outputs that are stored together.
        most_apart: Inputs that a group may have whose inputs lie apart.
        has_dot: Whether products of 8 bits use the processor's own instruction for them.
        dots_pairs: Whether products of rows that are rounded to bfloat16 do.
        has_tiles: Whether these, and products of integers with many rows, use its tile unit.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, f"trencadis_{name}")
            function.argtypes, function.restype = arguments, _INT if name in _NUMBERS else None
        self.panel = int(library.trencadis_panel())
        self.most_apart = int(library.trencadis_most_apart())
        self.has_dot = bool(library.trencadis_has_dot())
        self.dots_pairs = bool(library.trencadis_dots_pairs())
        self.has_tiles = bool(library.trencadis_has_tiles())

    def pack_floats(
        self, *weights: torch.Tensor, bias: torch.Tensor | None = None, rounds_rows: bool = False
    ) -> Packed:
        """Return weights ``[N, K]``, all float32 or all bfloat16, the outputs of several side by side.

        Args:
            weights: Weights of each layer.
            bias: float32, of all outputs, or None.
            rounds_rows: Rows are rounded to bfloat16, as weights are, before they meet them.
        """
        narrow = "bfloat_pairs" if rounds_rows else "bfloat"
        kind = KINDS[narrow if weights[0].dtype is torch.bfloat16 else "float"]
        num_inputs = weights[0].shape[1]
        packed, at = self._room(sum(map(len, weights)), num_inputs, kind, num_inputs, 0, bias=bias)
        first = 0
        for (part,) in self._parts((weight,) for weight in weights):
            self._library.trencadis_pack_floats(at, part.data_ptr(), len(part), first, packed.weights.data_ptr())
            first += len(part)
        return packed

    def pack_channels(self, *weights: tuple[torch.Tensor, torch.Tensor], bias: torch.Tensor | None = None) -> Packed:
        """Return int8 weights ``[N, K]`` with the scale of each output, float32 ``[N]``; several side by side.

        Args:
            weights: Values and scales of each layer.
            bias: float32, of all outputs, or None.
        """
        scales = torch.cat([scales for _, scales in weights])
        num_inputs = weights[0][0].shape[1]
        packed, at = self._room(len(scales), num_inputs, KINDS["channels"], num_inputs, 128, scales=scales, bias=bias)
        first = 0
        for (part,) in self._parts((values,) for values, _ in weights):
            values = part.view(torch.uint8) ^ 128
            self._library.trencadis_pack_ints(
                at, values.data_ptr(), None, None, len(part), first, packed.weights.data_ptr()
            )
            first += len(part)
        return packed

    def pack_groups(
        self,
        weights: Iterable[tuple[torch.Tensor, ...]],
        *,
        num_inputs: int,
        kind: str,
        group: int,
        zero: int,
        scales: torch.Tensor,
        bias: torch.Tensor | None = None,
        levels: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
    ) -> Packed:
        """Return weights ``[N, K]`` of a byte or half of one, with the scale of each group; several side by side.

        Args:
            weights: Weights of each layer, or of some of its outputs: values, uint8 ``[N, K]``, then scales, float16
                ``[N, K / G]``, then, if ``zero`` is negative, minimums. Taken one at a time.
            num_inputs: K.
            kind: Name in :data:`KINDS`.
            group: G.
            zero: Zero point; see :class:`Packed`; 0 for floats.
            scales: float32, of all outputs.
            bias: float32, of all outputs, or None.
            levels: Table of levels; see :class:`Packed`.
            order: Order of inputs; see :class:`Packed`.
        """
        packed, at = self._room(
            len(scales), num_inputs, KINDS[kind], group, zero, scales=scales, bias=bias, levels=levels, order=order
        )
        first = 0
        for parts in self._parts(weights):
            values, its_scales, *minimums = parts
            least = minimums[0].data_ptr() if minimums else None
            self._library.trencadis_pack_ints(
                at, values.data_ptr(), its_scales.data_ptr(), least, len(values), first, packed.weights.data_ptr()
            )
            first += len(values)
        return packed

    def linear(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """Return ``x @ weight.T + bias``, float32 ``[..., N]``; rows are rounded where the weights' kind says so.

        Args:
            x: float32 ``[..., K]``.
            packed: Weights and bias.

        Raises:
            ValueError: Rows have another size or dtype.
        """
        if x.shape[-1:] != (packed.num_inputs,) or x.dtype is not torch.float32:
            raise ValueError(f"{x.dtype} {list(x.shape)}: weights are for float32 [..., {packed.num_inputs}]")
        x, num_inputs = x.contiguous(), packed.num_inputs
        num_rows = x.numel() // num_inputs
        out = x.new_empty(*x.shape[:-1], packed.num_outputs)
        self._library.trencadis_linear(
            ctypes.addressof(view := product(packed)),
            x.data_ptr(),
            num_rows,
            num_inputs,
            out.data_ptr(),
            packed.num_outputs,
            threads_for(num_rows * num_inputs * packed.num_outputs),
        )
        del view
        return out

    def rows(self, ids: torch.Tensor, packed: Packed, scale: float) -> torch.Tensor:
        """Return rows of packed weights, times a scale, float32 ``[..., K]``.

        Args:
            ids: int64 ``[...]``.
            packed: Weights.
            scale: Factor of the result.

        Raises:
            IndexError: There is no such row.
        """
        ids, out = ids.contiguous(), torch.empty(*ids.shape, packed.num_inputs)
        wrong = self._library.trencadis_rows(
            ctypes.addressof(view := product(packed)), ids.data_ptr(), ids.numel(), scale, out.data_ptr()
        )
        del view
        if wrong >= 0:
            raise IndexError(f"index {wrong} of the ids is outside the {packed.num_outputs} rows of the weights")
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return ``x / sqrt(mean(x²) + eps) * weight``, over the last axis."""
        x, size = x.contiguous(), x.shape[-1]
        out = torch.empty_like(x)
        num_rows = x.numel() // size
        self._library.trencadis_rms_norm(
            x.data_ptr(), num_rows, size, weight.data_ptr(), eps, out.data_ptr(), threads_for(8 * x.numel())
        )
        return out

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        """Return ``(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias``, over the last axis."""
        x, size = x.contiguous(), x.shape[-1]
        out = torch.empty_like(x)
        num_rows, at = x.numel() // size, None if bias is None else bias.data_ptr()
        self._library.trencadis_layer_norm(
            x.data_ptr(), num_rows, size, weight.data_ptr(), at, eps, out.data_ptr(), threads_for(8 * x.numel())
        )
        return out

    def activate(self, x: torch.Tensor, activation: int) -> torch.Tensor:
        """Return ``activation(x)``."""
        x, size = x.contiguous(), x.shape[-1]
        out = torch.empty_like(x)
        self._library.trencadis_activate(
            x.data_ptr(), x.numel() // size, size, activation, out.data_ptr(), threads_for(8 * x.numel())
        )
        return out

    def gate(self, x: torch.Tensor, activation: int) -> torch.Tensor:
        """Return ``activation(gates) * values`` from both side by side, ``[..., 2 N]`` to ``[..., N]``."""
        size = x.shape[-1] // 2
        out = x.new_empty(*x.shape[:-1], size)
        num_rows = x.numel() // (2 * size)
        self._library.trencadis_gate(
            x.data_ptr(), num_rows, size, activation, out.data_ptr(), threads_for(8 * x.numel())
        )
        return out

    def rotate(self, x: torch.Tensor, heads: Heads, angles: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Norm and turn heads in place; see :meth:`FusedKernels.rotate`."""
        stride = x.shape[-1]
        cosines, sines = (None, None) if angles is None else (one.contiguous() for one in angles)
        norms = (None if norm is None else norm.data_ptr() for norm in (heads.query_norm, heads.key_norm))
        self._library.trencadis_rotate(
            x.data_ptr(),
            x.numel() // stride,
            stride,
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            *norms,
            heads.eps,
            heads.how,
            None if cosines is None else cosines.data_ptr(),
            None if sines is None else sines.data_ptr(),
            0 if cosines is None else cosines.shape[-1],
            threads_for(8 * x.numel()),
        )

    def route(self, logits: torch.Tensor, mixture: Mixture) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts of rows, int64 ``[M, C]``, and their weights, float32 ``[M, C]``, the best first.

        Args:
            logits: float32 ``[M, E]``.
            mixture: E, C and the way of choosing are read; its matrices are not.
        """
        scores = logits.clone(memory_format=torch.contiguous_format)
        experts = torch.empty(len(scores), mixture.num_chosen, dtype=torch.int64)
        weights = torch.empty(experts.shape)
        at = ctypes.addressof(mixture)
        self._library.trencadis_route(at, scores.data_ptr(), len(scores), experts.data_ptr(), weights.data_ptr())
        return experts, weights

    def mix(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, mixture: Mixture) -> torch.Tensor:
        """Return the weighted sum of what experts make of rows, float32 ``[M, H]``.

        Args:
            x: float32 ``[M, H]``.
            experts: Experts of each row, int64 ``[M, C]``.
            weights: Weights of these experts, float32 ``[M, C]``.
            mixture: Matrices and sizes are read; its way of choosing is not.

        Raises:
            IndexError: There is no such expert.
        """
        x, experts, weights = (one.contiguous() for one in (x, experts, weights))
        out = torch.empty_like(x)
        work = 3 * experts.numel() * mixture.hidden_size * mixture.inner_size
        rows = (x.data_ptr(), len(x), experts.data_ptr(), weights.data_ptr(), out.data_ptr())
        wrong = self._library.trencadis_mix(ctypes.addressof(mixture), *rows, threads_for(work))
        if wrong >= 0:
            raise IndexError(f"a row goes to expert {wrong}, and there are {mixture.num_experts}")
        return out

    def add_beside(self, x: torch.Tensor, gates: torch.Tensor | None, sums: torch.Tensor) -> None:
        """Add rows to sums in place, float32 ``[M, H]`` each, times the sigmoids of their gates ``[M]`` if there are some."""
        x, gates = x.contiguous(), None if gates is None else gates.contiguous()
        self._library.trencadis_add_beside(x.data_ptr(), _address(gates), len(x), x.shape[-1], sums.data_ptr())

    def _room(
        self,
        num_outputs: int,
        num_inputs: int,
        kind: int,
        group: int,
        zero: int,
        *,
        scales: torch.Tensor | None = None,
        bias: torch.Tensor | None,
        levels: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
    ) -> tuple[Packed, Any]:
        """Return packed weights that are still to be written, and the library's view of them."""
        if scales is not None:
            scales = nn.functional.pad(scales.float(), (0, -num_outputs % self.panel))
        empty = torch.empty(0, dtype=torch.uint8)
        packed = Packed(empty, scales, bias, levels, order, kind, group, zero, num_outputs, num_inputs)
        view = product(packed)
        size = int(self._library.trencadis_packed_bytes(ctypes.addressof(view)))
        return packed._replace(weights=torch.empty(size, dtype=torch.uint8)), ctypes.byref(view)

    def _parts(self, parts: Iterable[tuple[torch.Tensor, ...]]) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield contiguous weights; one that would end within a panel together with the next."""
        left: tuple[torch.Tensor, ...] = ()
        for part in parts:
            whole = tuple(map(torch.cat, zip(left, part, strict=True))) if left else part
            left = whole if len(whole[0]) % self.panel else ()
            if not left:
                yield tuple(tensor.detach().contiguous() for tensor in whole)
        if left:
            yield tuple(tensor.detach().contiguous() for tensor in left)


def threads_for(num_multiplications: int) -> int:
    """Return the threads of an operation that multiplies so often; reads PyTorch's setting."""
    return 1 if num_multiplications < SMALL else torch.get_num_threads()


@functools.cache
def native() -> Native | None:
    """Return the library, compiled at the first call; None, with a line in the log, where it cannot be."""
    try:
        return Native(load_library(Source(SOURCE)))
    except BackendError as error:
        logger.info("Linear layers run in PyTorch's own kernels: %s", error)
        return None


def check_quantization(quantization: str, device: torch.device, dtype: str) -> None:
    """Refuse integer layers where nothing computes them.

    Args:
        quantization: That was asked for: ``int8`` or ``int4``.
        device: Device of the model.
        dtype: That was asked for.

    Raises:
        BackendError: Another device than the CPU, or no compiler.
        ModelLoadError: A dtype that integer layers do not take.
    """
    where = f'[backend.torch] quantization = "{quantization}"'
    if device.type != "cpu":
        raise BackendError(
            f"{where}: only on the CPU, and the device is {device}.",
            hint='Set quantization = "none", or device = "cpu".',
        )
    if dtype not in ("auto", "float32"):
        raise ModelLoadError(
            f'{where}: activations between its layers are float32, and [model] dtype = "{dtype}".',
            hint='Set dtype = "auto".',
        )
    if native() is None:
        raise BackendError(
            f"{where}: its kernels are compiled on this machine, and there is no working C++ compiler.",
            hint='Install g++ or clang++, or set quantization = "none".',
        )
