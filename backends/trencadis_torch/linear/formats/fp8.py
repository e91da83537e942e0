"""FP8: floats of 8 bits with a scale for each block, output or matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import torch

from trencadis_torch.linear.formats.quantised import FLOATS, WHOLE, QuantisedSource
from trencadis_torch.linear.formats.unpacking import float8_scales, float8_weight, scaled_float8
from trencadis_torch.linear.held import FLOAT8, HeldWeight

__all__ = ["FbgemmFp8Source", "Fp8Source"]

_SCALES: Final = ("_scale_inv", "_scale")
_OF_ACTIVATIONS: Final = frozenset({"input_scale", "activation_scale", "input_scale_ub", "k_scale", "v_scale"})


class Fp8Source(QuantisedSource):
    """A checkpoint of DeepSeek's kind: ``weight`` in e4m3 or e5m2 and ``weight_scale_inv`` by blocks; also ``weight_scale`` by output or matrix.

    ``weight[n, k] = value[n, k] · scale[n / block, k / block]``, the last blocks cut. Held as stored, with float16 scales.
    :meth:`tensor` has the model's 16 bit data type, as transformers' own dequantisation. Scales of activations are not used:
    activations are not rounded by them.

    Source: DeepSeek-V3, inference/kernel.py (``weight_dequant``); transformers 5.24, integrations/finegrained_fp8.py.
    """

    method: ClassVar[str] = "fp8"
    marks: ClassVar[tuple[str, ...]] = (".weight_scale", ".weight_scale_inv")

    def _read_table(self, quantization: Mapping[str, Any]) -> None:
        form = str(quantization.get("fmt") or "e4m3").lower()
        if form not in ("e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2"):
            raise self._refusal("fmt", form, '"e4m3" and "e5m2"')
        block = quantization.get("weight_block_size")
        if block is not None and (len(block) != 2 or min(block) < 1):
            raise self._refusal("weight_block_size", block, "[outputs, inputs]")
        self._block = None if block is None else (int(block[0]), int(block[1]))

    @property
    def format(self) -> str:
        """The format with its blocks."""
        return "FP8" + ("" if self._block is None else f" in blocks of {self._block[0]} x {self._block[1]}")

    def _owner(self, stored: str) -> tuple[str, str] | None:
        if stored.rpartition(".")[2] in _OF_ACTIVATIONS:
            return None
        for suffix in _SCALES:
            if stored.endswith(suffix) and stored.removesuffix(suffix) in self._files.names():
                return stored.removesuffix(suffix), "scale"
        return stored, WHOLE

    def _quantised_shape(self, name: str) -> tuple[int, ...]:
        shape = self._part_shape(name, WHOLE)
        if len(shape) not in (2, 3):
            raise self._fault(name, f"it is no matrix: {list(shape)}")
        self._need_dtypes(name, {WHOLE: FLOAT8, "scale": [*FLOATS, torch.uint8, torch.float8_e8m0fnu]})
        scales = self._part_shape(name, "scale")
        for matrix in [scales] if len(shape) == 2 or len(scales) < 3 else [scales[1:]]:
            if float8_scales(matrix, shape[-2], shape[-1], self._block) is None:
                raise self._fault(name, f"its scales have the shape {list(scales)}, for {list(shape)}")
        return shape

    def _quantised_weight(self, name: str) -> HeldWeight:
        return float8_weight(self._part(name, WHOLE), self._part(name, "scale"), self._block, self._dtype)

    def _quantised_tensor(self, name: str) -> torch.Tensor:
        values, scales = self._part(name, WHOLE), self._part(name, "scale")
        if values.dim() == 2:
            return self._floats(values, scales)
        each = scales if scales.dim() == 3 or scales.shape[:1] == values.shape[:1] else scales.expand(values.shape[0])
        return torch.stack([self._floats(*pair) for pair in zip(values, each, strict=True)])

    def _floats(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return scaled_float8(values, scales, self._block).to(self._dtype)


class FbgemmFp8Source(Fp8Source):
    """A checkpoint of FBGEMM's kind, as Llama 3.1 405B FP8: ``weight_scale`` by output."""

    method: ClassVar[str] = "fbgemm_fp8"
