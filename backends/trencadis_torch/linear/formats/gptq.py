"""GPTQ: 4 or 8 bit in groups, several inputs in a word; the groups of inputs may be in an order of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import torch

from trencadis_torch.linear.formats.quantised import FLOATS, QuantisedSource
from trencadis_torch.linear.formats.unpacking import integer_groups, packed_integers
from trencadis_torch.linear.held import HeldWeight

__all__ = ["GptqSource"]

_ONES: Final = {4: 0x11111111, 8: 0x01010101}
"""A one in every value of a word."""


class GptqSource(QuantisedSource):
    """A checkpoint of AutoGPTQ or GPTQModel, formats ``gptq`` (zeros are stored less one) and ``gptq_v2``.

    ``weight[n, k] = scales[g_idx[k], n] · (qweight[k, n] - qzeros[g_idx[k], n])``, int32 words along inputs for values, along outputs
    for zeros. The form in which it is held is exact: with act-order its columns are in the order of their groups, and rows are put in that
    order before they meet it. Groups of different sizes are held as bfloat16.

    Source: GPTQModel 7.7, gptqmodel/nn_modules/qlinear/__init__.py (``dequantize_weight``) and gptqmodel/utils/model.py
    (``convert_gptq_v1_to_v2_format_module``: one is added to each value of a word, and carries within the word).
    """

    method: ClassVar[str] = "gptq"
    parts: ClassVar[Mapping[str, str]] = {
        ".qweight": "qweight",
        ".qzeros": "qzeros",
        ".scales": "scales",
        ".g_idx": "g_idx",
    }
    marks: ClassVar[tuple[str, ...]] = (".qweight",)

    def _read_table(self, quantization: Mapping[str, Any]) -> None:
        self._bits = int(quantization.get("bits", 4))
        if self._bits not in _ONES:
            raise self._refusal("bits", self._bits, "4 or 8")
        self._layout = str(quantization.get("checkpoint_format", quantization.get("format", "gptq"))).lower()
        if self._layout not in ("gptq", "gptq_v2"):
            raise self._refusal("checkpoint_format", self._layout, '"gptq" or "gptq_v2"')
        if quantization.get("dynamic"):
            raise self._refusal("dynamic", quantization["dynamic"], "one width for all layers")
        self._group = int(quantization.get("group_size", 128))
        self._act_order = bool(quantization.get("desc_act", False)) and self._group > 0

    @property
    def format(self) -> str:
        """The format with its bits and groups."""
        groups = f"in groups of {self._group}" if self._group > 0 else "by output"
        order = ", act-order" if self._act_order else ""
        return f"GPTQ{' v2' if self._layout == 'gptq_v2' else ''}, {self._bits} bit {groups}{order}"

    def _quantised_shape(self, name: str) -> tuple[int, ...]:
        rows, outputs = self._part_shape(name, "qweight")
        inputs = rows * 32 // self._bits
        group = self._group if self._group > 0 else inputs
        if inputs % group:
            raise self._fault(name, f"its {inputs} inputs are no multiple of the group of {group}")
        groups, words = inputs // group, -(-outputs * self._bits // 32)
        self._need_shapes(name, {"qzeros": (groups, words), "scales": (groups, outputs)})
        if self._has(name, "g_idx"):
            self._need_shapes(name, {"g_idx": (inputs,)})
            self._need_dtypes(name, {"g_idx": [torch.int32, torch.int64]})
        self._need_dtypes(name, {"qweight": [torch.int32], "qzeros": [torch.int32], "scales": FLOATS})
        return outputs, inputs

    def _quantised_weight(self, name: str) -> HeldWeight:
        outputs, _ = self.shape(name)
        values = packed_integers(self._part(name, "qweight").T, self._bits)
        zeros, scales = self._zeros(name).T[:outputs], self._part(name, "scales").T
        index = self._part(name, "g_idx").long() if self._has(name, "g_idx") else None
        if index is not None and not 0 <= int(index.min()) <= int(index.max()) < scales.shape[1]:
            raise self._fault(name, f"its g_idx names groups that are none of {scales.shape[1]}")
        return integer_groups(values, zeros, scales, bits=self._bits, index=index, dtype=self._dtype)

    def _zeros(self, name: str) -> torch.Tensor:
        """Return zeros, uint8 ``[K / G, at least N]``."""
        words = self._part(name, "qzeros")
        if self._layout == "gptq":
            words = (words.long() + _ONES[self._bits]).to(torch.int32)
        return packed_integers(words, self._bits)
