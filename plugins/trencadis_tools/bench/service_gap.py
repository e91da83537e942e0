"""How far tenants that have work drift apart in the service they get."""

from __future__ import annotations

import numpy as np

from trencadis.records import FloatArray, Int64Array

__all__ = ["ServiceGap"]


class ServiceGap:
    """The largest change of the difference in service of two tenants while both have requests that wait.

    That is what fair sharing bounds: by twice the larger of a prompt's cost and that of a full KV cache of output.

    Args:
        num_tenants: Tenants 0 .. num_tenants - 1.

    Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, theorem 4.4.
    """

    def __init__(self, num_tenants: int) -> None:
        shape = (num_tenants, num_tenants)
        self._served: FloatArray = np.zeros(num_tenants)
        self._num_waiting: Int64Array = np.zeros(num_tenants, np.int64)
        self._lowest: FloatArray = np.zeros(shape)
        self._highest: FloatArray = np.zeros(shape)
        self.largest = 0.0

    def waits(self, tenant: int) -> None:
        """A request of a tenant begins to wait."""
        self._num_waiting[tenant] += 1

    def runs(self, tenant: int) -> None:
        """A request of a tenant waits no more."""
        self._num_waiting[tenant] -= 1

    def serve(self, tenants: Int64Array, costs: FloatArray) -> None:
        """Count service; then look at the gaps.

        Args:
            tenants: Who was served; one may come several times.
            costs: How much, as long as ``tenants``.
        """
        self._served += np.bincount(tenants, costs, minlength=len(self._served))
        gaps = self._served[:, None] - self._served
        have_work = self._num_waiting > 0
        both = have_work[:, None] & have_work
        self._lowest = np.where(both, np.minimum(self._lowest, gaps), gaps)
        self._highest = np.where(both, np.maximum(self._highest, gaps), gaps)
        self.largest = max(self.largest, float((self._highest - self._lowest).max()))
