"""Layer gate: a backend waits in a step for layers of layer-wise loads and saves."""

from __future__ import annotations

import logging
import time

from trencadis.interfaces.kv_connector import KVWorkerSide

__all__ = ["LayerGate"]

logger = logging.getLogger("trencadis.kv")


class LayerGate:
    """Waits for the layers of a step, within a time budget. On the backend's thread.

    Made for each step by :meth:`of`; a connector that raises has not brought the layer.

    Args:
        connector: The worker side.
        budget_s: For all layers together, real time.

    Attributes:
        is_whole: All layers waited for so far have come.
    """

    def __init__(self, connector: KVWorkerSide, *, budget_s: float) -> None:
        self._connector = connector
        self._until_s = time.monotonic() + budget_s
        self.is_whole = True

    @classmethod
    def of(cls, connector: KVWorkerSide | None, *, budget_s: float) -> LayerGate | None:
        """Return the gate of the step that begins now, or None if the step needs no waits."""
        if connector is None:
            return None
        try:
            wants = connector.wants_layers
        except Exception:
            logger.warning("The KV connector's wants_layers raised; no layer waits.", exc_info=True)
            return None
        return cls(connector, budget_s=budget_s) if wants else None

    def wait(self, layer: int) -> None:
        """Wait until a layer may be written and read; a load that is late is given up, and its sequence is discarded.

        Args:
            layer: Number of the layer; see ``KVPart.layer``.
        """
        left_s = max(0.0, self._until_s - time.monotonic())
        try:
            came = self._connector.wait_layer(layer, budget_s=left_s)
        except Exception:
            logger.warning("The KV connector's wait_layer() raised; the layer counts as missing.", exc_info=True)
            came = False
        self.is_whole &= came
