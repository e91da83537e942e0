"""AWQ: 4 bit in groups, eight outputs in a word, in an order of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import torch

from trencadis_torch.linear.formats.quantised import FLOATS, QuantisedSource
from trencadis_torch.linear.formats.unpacking import integer_groups, nibbles
from trencadis_torch.linear.held import HeldWeight

__all__ = ["AwqSource"]

ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which output of eight each four bits of a word are, lowest first."""


class AwqSource(QuantisedSource):
    """A checkpoint of AutoAWQ in the layout ``gemm``; exact in the form in which it is held.

    ``weight[n, k] = scales[k / G, n] · (qweight[k, n] - qzeros[k / G, n])``, words of int32 along outputs.

    Source: AutoAWQ, awq/modules/linear/gemm.py and awq/utils/packing_utils.py (version 0.2.9).
    """

    method: ClassVar[str] = "awq"
    parts: ClassVar[Mapping[str, str]] = {".qweight": "qweight", ".qzeros": "qzeros", ".scales": "scales"}
    marks: ClassVar[tuple[str, ...]] = (".qweight",)

    def _read_table(self, quantization: Mapping[str, Any]) -> None:
        bits = quantization.get("bits", quantization.get("w_bit", 4))
        if bits != 4:
            raise self._refusal("bits", bits, "4")
        version = str(quantization.get("version", quantization.get("format", "gemm"))).lower()
        if version != "gemm":
            raise self._refusal("version", version, '"gemm"')
        self._group = int(quantization.get("group_size", quantization.get("q_group_size", 128)))

    @property
    def format(self) -> str:
        """The format with its groups."""
        return f"AWQ, 4 bit {'in groups of ' + str(self._group) if self._group > 0 else 'by output'}"

    def _quantised_shape(self, name: str) -> tuple[int, ...]:
        inputs, words = self._part_shape(name, "qweight")
        group = self._group if self._group > 0 else inputs
        if inputs % group:
            raise self._fault(name, f"its {inputs} inputs are no multiple of the group of {group}")
        groups, outputs = inputs // group, words * len(ORDER)
        self._need_shapes(name, {"qzeros": (groups, words), "scales": (groups, outputs)})
        self._need_dtypes(name, {"qweight": [torch.int32], "qzeros": [torch.int32], "scales": FLOATS})
        return outputs, inputs

    def _quantised_weight(self, name: str) -> HeldWeight:
        values, zeros = (_in_order(self._part(name, label)) for label in ("qweight", "qzeros"))
        return integer_groups(values.T.contiguous(), zeros.T, self._part(name, "scales").T, bits=4)


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """Return the values of int32 words ``[R, N / 8]`` as uint8 ``[R, N]``. Pure."""
    places = torch.tensor([ORDER.index(output) for output in range(len(ORDER))])
    values = nibbles(words)
    return values.reshape(len(values), -1, len(ORDER))[..., places].flatten(1)
