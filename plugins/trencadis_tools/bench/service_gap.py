"""Service gap: how far the service of tenants with waiting requests drifts apart."""

from __future__ import annotations

import numpy as np

from trencadis.records import FloatArray, Int64Array

__all__ = ["ServiceGap"]


class ServiceGap:
    """Largest change of the service difference between two tenants while both have waiting requests.

    Fair sharing bounds this gap by twice the larger of the cost of a prompt and the cost of a KV cache full of output.

    Args:
        num_tenants: Number of tenants; they are numbered 0 .. num_tenants - 1.

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
        """Count a request of a tenant as waiting."""
        self._num_waiting[tenant] += 1

    def runs(self, tenant: int) -> None:
        """Count a request of a tenant as no longer waiting."""
        self._num_waiting[tenant] -= 1

    def serve(self, tenants: Int64Array, costs: FloatArray) -> None:
        """Add service, then update the largest gap.

        Args:
            tenants: Tenant numbers, int64 ``[n]``; may repeat.
            costs: Service cost for each entry of ``tenants``, ``[n]``.
        """
        self._served += np.bincount(tenants, costs, minlength=len(self._served))
        gaps = self._served[:, None] - self._served
        have_work = self._num_waiting > 0
        both = have_work[:, None] & have_work
        self._lowest = np.where(both, np.minimum(self._lowest, gaps), gaps)
        self._highest = np.where(both, np.maximum(self._highest, gaps), gaps)
        self.largest = max(self.largest, float((self._highest - self._lowest).max()))
