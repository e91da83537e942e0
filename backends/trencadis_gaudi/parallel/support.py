"""Which settings of the backend work where ranks divide a model: read when it joins others, and by the documentation.

What the core has settings for stands in ``trencadis.engine.layout_support``.
"""

from __future__ import annotations

from typing import Final

from trencadis.records import LayoutFeature

__all__ = ["FEATURES"]

FEATURES: Final = (
    LayoutFeature(name="Gaudi: HPU graphs, torch.compile, one operation at a time", setting="backend.gaudi.mode"),
)
