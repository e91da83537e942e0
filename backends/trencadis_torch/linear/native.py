"""``linear.cpp`` from Python: tensors in, tensors out. float32 on the CPU; every call runs in the threads that torch would use."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

from trencadis.errors import BackendError, ModelLoadError
from trencadis_torch.linear.heads import Heads
from trencadis_torch.native_build import Source, load_library

__all__ = ["ACTIVATIONS", "SOURCE", "Native", "check_int8", "native", "threads_for"]

logger = logging.getLogger("trencadis.torch")

SOURCE: Final = Path(__file__).with_name("linear.cpp")

ACTIVATIONS: Final = {"silu": 0, "gelu_pytorch_tanh": 1, "gelu": 2, "relu2": 3, "relu": 4}
"""Names in transformers' configurations, and their numbers in the library."""

SMALL: Final = 1 << 18
"""Multiplications below which one thread is quicker than waking others."""

_INT, _AT, _FLOAT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "pack_float": (_AT, _INT, _INT, _AT),
    "pack_int8": (_AT, _INT, _INT, _AT, _AT),
    "linear_float": (_AT, _INT, _INT, _AT, _AT, _INT, _INT, _AT, _INT, _INT),
    "linear_int8": (_AT, _INT, _INT, _AT, _AT, _AT, _AT, _INT, _INT, _AT, _INT, _INT),
    "rows_float": (_AT, _INT, _AT, _INT, _INT, _FLOAT, _AT),
    "rows_int8": (_AT, _AT, _INT, _AT, _INT, _INT, _FLOAT, _AT),
    "rms_norm": (_AT, _INT, _INT, _AT, _FLOAT, _AT, _INT),
    "layer_norm": (_AT, _INT, _INT, _AT, _AT, _FLOAT, _AT, _INT),
    "gate": (_AT, _INT, _INT, _INT, _AT, _INT),
    "activate": (_AT, _INT, _INT, _INT, _AT, _INT),
    "rotate": (_AT, _INT, _INT, _INT, _INT, _INT, _AT, _AT, _FLOAT, _INT, _AT, _AT, _INT, _INT),
}


class Native:
    """The library, loaded.

    Args:
        library: ``linear.cpp``, compiled.

    Attributes:
        panel: Outputs that are stored together.
        has_vnni: Whether int8 products use the processor's own instruction for them.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, f"trencadis_{name}")
            function.argtypes, function.restype = arguments, _INT if name.startswith("rows") else None
        self.panel = int(library.trencadis_panel())
        self.has_vnni = bool(library.trencadis_has_vnni())

    def pack_float(self, *weights: torch.Tensor) -> torch.Tensor:
        """Return weights ``[N, K]``, the outputs of several side by side, as panels: float32, one-dimensional."""
        num_inputs = weights[0].shape[1]
        packed = torch.empty(self._whole(sum(map(len, weights))) * num_inputs)
        for first, part in self._parts(weights):
            plain = part.detach().float().contiguous()
            at = packed.data_ptr() + first * num_inputs * packed.itemsize
            self._library.trencadis_pack_float(plain.data_ptr(), len(plain), num_inputs, at)
        return packed

    def pack_int8(self, *weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int8 weights as panels likewise, and 128 times the sum of each output's, int32, padded to whole panels."""
        num_inputs, whole = weights[0].shape[1], self._whole(sum(map(len, weights)))
        depth = -(-num_inputs // 4) * 4
        packed = torch.empty(whole * depth, dtype=torch.int8)
        sums = torch.empty(whole, dtype=torch.int32)
        for first, part in self._parts(weights):
            plain = part.contiguous()
            at = (packed.data_ptr() + first * depth, sums.data_ptr() + first * sums.itemsize)
            self._library.trencadis_pack_int8(plain.data_ptr(), len(plain), num_inputs, *at)
        return packed, sums

    def linear_float(
        self, x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, num_outputs: int
    ) -> torch.Tensor:
        """Return ``x @ weight.T + bias``, ``[..., N]``.

        Args:
            x: float32 ``[..., K]``.
            weights: Packed.
            bias: float32 ``[N]``, or None.
            num_outputs: N.
        """
        x, num_inputs = x.contiguous(), x.shape[-1]
        num_rows = x.numel() // num_inputs
        out = x.new_empty(*x.shape[:-1], num_outputs)
        self._library.trencadis_linear_float(
            x.data_ptr(),
            num_rows,
            num_inputs,
            weights.data_ptr(),
            None if bias is None else bias.data_ptr(),
            num_outputs,
            num_inputs,
            out.data_ptr(),
            num_outputs,
            threads_for(num_rows * num_inputs * num_outputs),
        )
        return out

    def linear_int8(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        scales: torch.Tensor,
        sums: torch.Tensor,
        bias: torch.Tensor | None,
        num_outputs: int,
    ) -> torch.Tensor:
        """Return the same with int8 weights; each row of ``x`` is quantised by its own largest magnitude.

        Args:
            x: float32 ``[..., K]``.
            weights: Packed.
            scales: Of each output's weights, float32, padded to whole panels.
            sums: From :meth:`pack_int8`.
            bias: float32 ``[N]``, or None.
            num_outputs: N.
        """
        x, num_inputs = x.contiguous(), x.shape[-1]
        num_rows = x.numel() // num_inputs
        out = x.new_empty(*x.shape[:-1], num_outputs)
        self._library.trencadis_linear_int8(
            x.data_ptr(),
            num_rows,
            num_inputs,
            weights.data_ptr(),
            scales.data_ptr(),
            sums.data_ptr(),
            None if bias is None else bias.data_ptr(),
            num_outputs,
            num_inputs,
            out.data_ptr(),
            num_outputs,
            threads_for(num_rows * num_inputs * num_outputs),
        )
        return out

    def rows_float(
        self, ids: torch.Tensor, weights: torch.Tensor, shape: tuple[int, int], scale: float
    ) -> torch.Tensor:
        """Return rows of packed weights, times a scale, ``[..., K]``.

        Args:
            ids: int64 ``[...]``.
            weights: Packed.
            shape: N and K.
            scale: Of the result.

        Raises:
            IndexError: There is no such row.
        """
        ids, out = ids.contiguous(), torch.empty(*ids.shape, shape[1])
        _check_rows(
            self._library.trencadis_rows_float(
                weights.data_ptr(), shape[0], ids.data_ptr(), ids.numel(), shape[1], scale, out.data_ptr()
            ),
            shape[0],
        )
        return out

    def rows_int8(
        self, ids: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int], scale: float
    ) -> torch.Tensor:
        """Return the same of int8 weights, with the scale of each output."""
        ids, out = ids.contiguous(), torch.empty(*ids.shape, shape[1])
        at = (weights.data_ptr(), scales.data_ptr())
        _check_rows(
            self._library.trencadis_rows_int8(
                *at, shape[0], ids.data_ptr(), ids.numel(), shape[1], scale, out.data_ptr()
            ),
            shape[0],
        )
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

    def _parts(self, weights: tuple[torch.Tensor, ...]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield weights with the output that each begins at; as one where another than the last would end within a panel."""
        if any(len(part) % self.panel for part in weights[:-1]):
            weights = (torch.cat(weights),)
        first = 0
        for part in weights:
            yield first, part
            first += len(part)

    def _whole(self, num_outputs: int) -> int:
        return -(-num_outputs // self.panel) * self.panel


def _check_rows(wrong: int, num_rows: int) -> None:
    if wrong >= 0:
        raise IndexError(f"index {wrong} of the ids is outside the {num_rows} rows of the weights")


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


def check_int8(device: torch.device, dtype: str) -> None:
    """Refuse int8 layers where nothing computes them.

    Args:
        device: Of the model.
        dtype: That was asked for.

    Raises:
        BackendError: Another device than the CPU, or no compiler.
        ModelLoadError: A dtype that int8 layers do not take.
    """
    where = '[backend.torch] quantization = "int8"'
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
