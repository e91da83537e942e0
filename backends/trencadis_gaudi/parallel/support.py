"""Settings of the backend that work with ranks that divide a model, for joining ranks and for the documentation.

Settings of the core are in ``trencadis.registry.layout_support``. Pipeline stages are refused by the backend's component, which does
not provide ``backend.pipeline``.
"""

from __future__ import annotations

from typing import Final

from trencadis.records import LayoutFeature

__all__ = ["FEATURES"]

_REFUSED: Final = {
    "pipeline": "the backend gaudi has no stages",
    "attention": "the backend gaudi divides the attention of every sequence",
}

FEATURES: Final = (
    LayoutFeature(
        name="Gaudi: HPU graphs, torch.compile, one operation at a time",
        setting="backend.gaudi.mode",
        unless=("auto",),
        refused=_REFUSED,
    ),
    LayoutFeature(
        name="Gaudi: graphs within a budget of memory, the same on every rank",
        setting="backend.gaudi.capture",
        unless=("capture_all",),
        refused=_REFUSED,
    ),
    LayoutFeature(name="Gaudi: unified passes", setting="backend.gaudi.layout", unless=("padded",), refused=_REFUSED),
    LayoutFeature(
        name="Gaudi: blocks read by range", setting="backend.gaudi.contiguous", unless=(False,), refused=_REFUSED
    ),
    LayoutFeature(
        name="Gaudi: merged prefills", setting="backend.gaudi.merged_prefill", unless=(False,), refused=_REFUSED
    ),
    LayoutFeature(
        name="Gaudi: fused norms, rotary embeddings and experts",
        setting="backend.gaudi.fused_kernels",
        unless=(False,),
        refused=_REFUSED,
    ),
    LayoutFeature(
        name="Gaudi: fp8 linear layers, with scales of a rank's part of each weight",
        setting="backend.gaudi.fp8",
        unless=("off",),
        refused=_REFUSED,
    ),
    LayoutFeature(
        name="Gaudi: fp8 KV cache", setting="backend.gaudi.kv_cache_dtype", unless=("auto",), refused=_REFUSED
    ),
    LayoutFeature(
        name="Gaudi: buckets prepared while there is nothing to serve, by all ranks at once",
        setting="backend.gaudi.warmup_required",
        unless=(0,),
        refused=_REFUSED,
    ),
)
"""Features in the order of the documentation."""
