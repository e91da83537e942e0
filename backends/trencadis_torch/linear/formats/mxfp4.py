"""MXFP4 as gpt-oss has it: matrices of experts stacked, 4 bit floats with a power of two for each 32."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Final

import torch

from trencadis_torch.linear.formats.quantised import QuantisedSource
from trencadis_torch.linear.formats.unpacking import fp4_groups, powers_of_two
from trencadis_torch.linear.held import GroupedWeight, HeldWeight, Matrices, StackedWeight

__all__ = ["Mxfp4Source"]

GROUP: Final = 32


class Mxfp4Source(QuantisedSource):
    """A checkpoint with ``*_blocks`` and ``*_scales``; exact in the form in which it is held: places in a table of 16 levels.

    Stored are ``blocks`` uint8 ``[E, N, K / 32, 16]`` and ``scales`` uint8 ``[E, N, K / 32]``:
    ``weight[e, n, k] = e2m1(blocks) · 2 ** (scales - 127)``. A checkpoint without quantisation has the transposed ``[E, K, N]``, and so
    have :meth:`shape` and :meth:`tensor`.

    Source: gpt-oss, gpt_oss/torch/weights.py; OCP Microscaling Formats (MX) Specification 1.0.
    """

    method: ClassVar[str] = "mxfp4"
    parts: ClassVar[Mapping[str, str]] = {"_blocks": "blocks", "_scales": "scales"}
    marks: ClassVar[tuple[str, ...]] = ("_blocks",)

    def _read_table(self, quantization: Mapping[str, Any]) -> None:
        pass  # it has nothing but names of modules that are not quantised

    @property
    def format(self) -> str:
        """The format with its groups."""
        return f"MXFP4, 4 bit in groups of {GROUP}"

    def _quantised_shape(self, name: str) -> tuple[int, ...]:
        shape = self._part_shape(name, "blocks")
        if len(shape) != 4 or shape[-1] != GROUP // 2:
            raise self._fault(
                name, f"its blocks have the shape {list(shape)}, not [experts, outputs, groups, {GROUP // 2}]"
            )
        experts, outputs, groups, _ = shape
        self._need_shapes(name, {"scales": (experts, outputs, groups)})
        self._need_dtypes(name, {"blocks": [torch.uint8], "scales": [torch.uint8, torch.float8_e8m0fnu]})
        return experts, groups * GROUP, outputs

    def expert(self, name: str, index: int) -> GroupedWeight:
        """Return one expert's matrix, ``[N, K]``.

        Args:
            name: Stacked weight, such as ``model.layers.0.mlp.experts.down_proj``.
            index: Expert.
        """
        blocks, scales = self._part(name, "blocks")[index], self._part(name, "scales")[index]
        return fp4_groups(blocks.flatten(1), powers_of_two(scales))

    def stack(self, name: str) -> StackedWeight:
        """Return the matrices of all experts, exactly."""
        if not self.is_quantised(name):
            return super().stack(name)
        count = range(self.shape(name)[0])
        return StackedWeight(Matrices([partial(self.expert, name, index) for index in count]), flipped=True)

    def _quantised_weight(self, name: str) -> HeldWeight:
        raise self._fault(name, "matrices of experts are stacked, and are asked for one by one")

    def _quantised_tensor(self, name: str) -> torch.Tensor:
        experts, inputs, outputs = self.shape(name)
        made = torch.empty(experts, inputs, outputs)
        for index in range(experts):
            made[index] = self.expert(name, index).dequantised().T
        return made
