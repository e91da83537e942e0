"""Which settings of the backend work where ranks divide a model: read when a backend joins others, and by the documentation.

What the core has settings for stands in ``trencadis.registry.layout_support``.
"""

from __future__ import annotations

from typing import Final

from trencadis.records import LayoutFeature

__all__ = ["FEATURES", "ONLY_EMBEDS"]

_NO_GRAPH = "no graph holds what ranks exchange"

_NO_LAYERS = "it only embeds, and is not divided"

ONLY_EMBEDS: Final = LayoutFeature(
    name="A model that only embeds", refused={"tensor": _NO_LAYERS, "pipeline": _NO_LAYERS}
)

FEATURES: Final = (
    LayoutFeature(name="Padded shapes and buckets", setting="backend.torch.layout", unless=("ragged",)),
    LayoutFeature(name="Attention by another kernel", setting="backend.torch.attention", unless=("auto",)),
    LayoutFeature(name="int8 weights", setting="backend.torch.quantization", unless=("none",)),
    LayoutFeature(name="KV cache in int8 or another dtype", setting="backend.torch.kv_dtype", unless=("auto",)),
    LayoutFeature(name="A model from a .gguf file, which several ranks dequantise when they load it"),
    ONLY_EMBEDS,
    LayoutFeature(
        name="torch.compile",
        setting="backend.torch.compile",
        unless=("off",),
        refused={"tensor": _NO_GRAPH, "pipeline": _NO_GRAPH},
        remedy='Set [backend.torch] compile = "off".',
    ),
    LayoutFeature(
        name="CUDA graphs",
        setting="backend.torch.graphs",
        unless=("off",),
        refused={"tensor": _NO_GRAPH, "pipeline": _NO_GRAPH},
        remedy='Set [backend.torch] graphs = "off".',
    ),
)
"""In the order of the documentation. What no setting asks for is refused when the model is loaded."""
