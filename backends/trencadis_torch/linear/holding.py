"""The form in which a model's matrices are held: that of its files, or one that they are rounded to."""

from __future__ import annotations

from typing import Final

import attrs

from trencadis_torch.linear.held import FloatWeight, HeldWeight, JoinedWeight
from trencadis_torch.linear.packed import INT4_GROUP, quantise, quantise_groups

__all__ = ["AS_STORED", "BFLOAT16", "FLOAT32", "Holding"]

AS_STORED: Final = "as stored"
BFLOAT16: Final = "bfloat16"
FLOAT32: Final = "float32"


@attrs.frozen
class Holding:
    """The form in which matrices are held. One that a checkpoint has rounded stays as it is.

    Attributes:
        form: ``as stored``, ``float32``, ``bfloat16`` whose rows are rounded as well, ``int8`` or ``int4``, which is int8 where inputs
            cannot be cut into groups.
    """

    form: str

    def hold(self, weight: HeldWeight) -> HeldWeight:
        """Return a matrix in the form that is held."""
        if isinstance(weight, JoinedWeight):
            return attrs.evolve(weight, parts=[self.hold(part) for part in weight.parts])
        if not isinstance(weight, FloatWeight) or self.form == AS_STORED:
            return weight
        if self.form == BFLOAT16:
            return FloatWeight(weight.values.bfloat16(), rounds_rows=True)
        if self.form == "int4" and not weight.shape[1] % INT4_GROUP:
            return quantise_groups(weight.values, INT4_GROUP)
        if self.form in ("int4", "int8"):
            return quantise(weight.values)
        return FloatWeight(weight.values.float())

    def embed(self, weight: HeldWeight) -> HeldWeight:
        """Return embeddings that no layer shares in the form that is held: integers would round them, and save no time."""
        return self.hold(weight) if self.form == BFLOAT16 else weight
