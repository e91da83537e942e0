"""bitsandbytes: 4 bit by a table of 16 levels (nf4, fp4), or int8 by output."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import torch

from trencadis_torch.linear.formats.quantised import WHOLE, QuantisedSource
from trencadis_torch.linear.held import SMALLEST_GROUP, ChannelWeight, FloatWeight, GroupedWeight, HeldWeight

__all__ = ["BitsAndBytesSource"]

_PARTS: Final = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_STATE: Final = ".quant_state.bitsandbytes__"
_DTYPES: Final[dict[str, torch.dtype | None]] = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": None}
"""Data types before quantisation, in which :meth:`tensor` has them; of float32 the model's, for no 4 bit weight is worth 32."""

_ZERO: Final = 128.0
"""The integer that stands for nothing."""


class BitsAndBytesSource(QuantisedSource):
    """A checkpoint of bitsandbytes as transformers saves it: 4 bit with and without double quantisation, or int8.

    4 bit, over the row-major weight: ``weight[i] = quant_map[value[i]] · absmax[i / blocksize]``, the even values in the high bits;
    doubly quantised ``absmax[j] = nested_quant_map[absmax[j]] · nested_absmax[j / nested_blocksize] + nested_offset``. Held as places
    in a table of 16 integers of 8 bits, from which a level differs by at most a 254th of the largest; where blocks go over the ends of
    rows so that no 16 inputs share a scale, as bfloat16. :meth:`tensor` has the data type that the weight had before, as bitsandbytes'
    dequantisation. int8: ``weight = value · SCB / 127``, held as int8.

    Source: bitsandbytes 0.50, functional.py (``QuantState.from_dict``), backends/default/ops.py (``_dequantize_4bit_compute``).
    """

    method: ClassVar[str] = "bitsandbytes"
    marks: ClassVar[tuple[str, ...]] = (".SCB", ".absmax")

    @classmethod
    def reads(cls, quantization: Mapping[str, Any]) -> bool:
        """Return whether this class reads a format: older tables name no method, but a width."""
        is_named = quantization.get("load_in_4bit") or quantization.get("load_in_8bit")
        return super().reads(quantization) or (quantization.get("quant_method") is None and bool(is_named))

    def _read_table(self, quantization: Mapping[str, Any]) -> None:
        self._bits = 8 if quantization.get("load_in_8bit") or quantization.get("_load_in_8bit") else 4
        self._kind = str(quantization.get("bnb_4bit_quant_type", "fp4"))
        if self._bits == 4 and self._kind not in ("nf4", "fp4"):
            raise self._refusal("bnb_4bit_quant_type", self._kind, '"nf4" or "fp4"')

    @property
    def format(self) -> str:
        """The format, and how levels of 4 bit are held."""
        if self._bits == 8:
            return "bitsandbytes, int8 by output"
        return f"bitsandbytes, 4 bit ({self._kind}), levels rounded to 8 bits"

    def _owner(self, stored: str) -> tuple[str, str] | None:
        module, _, last = stored.rpartition(".")
        if last in _PARTS and module.endswith(".weight"):
            return module, last
        if _STATE in stored:
            return stored.partition(_STATE)[0], "quant_state"
        if last == "SCB":
            return module + ".weight", "SCB"
        return None if last == "weight_format" else (stored, WHOLE)

    def _quantised_shape(self, name: str) -> tuple[int, ...]:
        stored = self._part_shape(name, WHOLE)
        if self._has(name, "SCB"):
            if len(stored) != 2:
                raise self._fault(name, f"it is no matrix: {list(stored)}")
            self._need_shapes(name, {"SCB": stored[:1]})
            self._need_dtypes(name, {WHOLE: [torch.int8], "SCB": [torch.float32]})
            return stored
        self._need_shapes(name, {"quant_map": (16,)})
        self._part_shape(name, "quant_state")
        state = self._state(name)
        shape: tuple[int, ...] = tuple(state["shape"])
        blocks = -(-math.prod(shape) // state["blocksize"])
        self._need_shapes(name, {"absmax": (blocks,)})
        if "nested_blocksize" in state:
            nested = -(-blocks // state["nested_blocksize"])
            self._need_shapes(name, {"nested_absmax": (nested,), "nested_quant_map": (256,)})
        return shape

    def _state(self, name: str) -> dict[str, Any]:
        """Return what a weight's state in JSON says.

        Raises:
            ModelLoadError: It is not what bitsandbytes writes.
        """
        try:
            state: dict[str, Any] = json.loads(bytes(self._part(name, "quant_state").tolist()))
            if state["dtype"] not in _DTYPES:
                raise ValueError(f"dtype {state['dtype']!r}")
            ints = [*state["shape"], state["blocksize"], state.get("nested_blocksize", 1)]
            if not all(isinstance(value, int) and value > 0 for value in ints):
                raise ValueError(f"sizes {ints}")
            if "nested_blocksize" in state:
                float(state["nested_offset"])
        except (ValueError, KeyError, TypeError) as error:
            raise self._fault(name, f"its quant_state cannot be read: {type(error).__name__}: {error}") from error
        return state

    def _quantised_weight(self, name: str) -> HeldWeight:
        if self._has(name, "SCB"):
            return ChannelWeight(self._part(name, WHOLE), self._part(name, "SCB").float() / 127)
        state, (rows, columns) = self._state(name), self.shape(name)
        run = math.gcd(columns, state["blocksize"])
        if run < min(SMALLEST_GROUP, columns):
            return FloatWeight(self._quantised_tensor(name))
        levels, factor = _integers(self._part(name, "quant_map").float())
        scales = (
            self._absmax(name, state).repeat_interleave(state["blocksize"] // run)[: rows * columns // run] / factor
        )
        scales = scales.view(rows, columns // run)
        return GroupedWeight(self._places(name).view(rows, columns), scales, -_ZERO * scales, 4, levels)

    def _quantised_tensor(self, name: str) -> torch.Tensor:
        if self._has(name, "SCB"):
            return super()._quantised_tensor(name)
        state, shape = self._state(name), self.shape(name)
        scales = self._absmax(name, state).repeat_interleave(state["blocksize"])[: math.prod(shape)]
        floats = self._part(name, "quant_map").float()[self._places(name).int()] * scales
        return floats.view(shape).to(_DTYPES[state["dtype"]] or self._dtype)

    def _places(self, name: str) -> torch.Tensor:
        """Return the place of each weight in the table, uint8, flat."""
        shape = self.shape(name)
        octets = self._part(name, WHOLE).contiguous().view(torch.uint8).flatten()
        if octets.numel() != -(-math.prod(shape) // 2):
            raise self._fault(name, f"it has {octets.numel()} bytes for {list(shape)}")
        return torch.stack((octets >> 4, octets & 0xF), dim=-1).flatten()[: math.prod(shape)]

    def _absmax(self, name: str, state: Mapping[str, Any]) -> torch.Tensor:
        absmax = self._part(name, "absmax")
        if "nested_blocksize" not in state:
            return absmax.float()
        scales = self._part(name, "nested_absmax").float().repeat_interleave(state["nested_blocksize"])
        levels = self._part(name, "nested_quant_map").float()[absmax.int()]
        return levels * scales[: absmax.numel()] + float(state["nested_offset"])


def _integers(levels: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return a table as integers, uint8 ``[16]``, and the factor: ``level = (integer - 128) / factor``, as near as 8 bits can have it. Pure."""
    largest = float(levels.abs().max())
    factors = torch.linspace(64.0, 127.0, 4033) / (largest if math.isfinite(largest) and largest > 0 else 1.0)
    scaled = levels[:, None] * factors
    best = int(((scaled.round() - scaled) / factors).abs().amax(0).argmin())
    return (scaled[:, best].round() + _ZERO).to(torch.uint8), float(factors[best])
