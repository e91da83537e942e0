"""A pass whose layers wait for what a KV connector brings, or takes away, layer by layer."""

from __future__ import annotations

from typing import Any

import torch

from trencadis.interfaces import LayerGate
from trencadis_torch.inputs import AttentionPass

__all__ = ["GatedPass"]


class GatedPass:
    """Another pass, each layer of which goes through a gate. Made only for steps that have one.

    Args:
        inner: Attends.
        gate: Of the step.
    """

    def __init__(self, inner: AttentionPass, gate: LayerGate) -> None:
        self._inner = inner
        self._gate = gate

    def attend(
        self, layer_index: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Wait until the layer may be written to and read, then attend; as in ``RaggedPass``."""
        self._gate.wait(layer_index)
        return self._inner.attend(layer_index, query, keys, values, **options)
