"""The KV cache in fp8: a scale for the keys and one for the values of each layer, measured or 1."""

from __future__ import annotations

import hashlib
import logging
import re
from typing import Any

import attrs
import torch

from trencadis.errors import ModelLoadError
from trencadis_gaudi.flat_cache import CacheScales
from trencadis_gaudi.fp8.measurements import Measurements
from trencadis_gaudi.fp8.methods import ScaleMethod
from trencadis_gaudi.fp8.scales import FP8, Fp8Device, activation_scale
from trencadis_torch.cache.kv_cache import AttentionLayer

__all__ = ["cache_layers"]

logger = logging.getLogger("trencadis.gaudi")

_ATTENTION = re.compile(r"(attn|attention)$")
"""Names of modules that have a layer of the cache; a decoder layer may have its number too."""


def cache_layers(
    model: Any,
    layers: tuple[AttentionLayer, ...],
    device: Fp8Device,
    method: ScaleMethod,
    measurements: Measurements | None,
) -> tuple[tuple[AttentionLayer, ...], dict[int, CacheScales], str]:
    """Return the layers as the cache holds them, their scales by index, and a digest of these; none where all are 1.

    Args:
        model: Of transformers.
        layers: Its attention layers.
        device: Its range.
        method: Decides the scales.
        measurements: Of keys and values; None, or without any of the cache: scales are 1.

    Raises:
        ModelLoadError: Some layers were measured, and others not.
    """
    names = {getattr(part, "layer_idx", None): name for name, part in model.named_modules() if _ATTENTION.search(name)}
    measured = {layer.index: _measured(names.get(layer.index, ""), measurements) for layer in layers}
    known = {index: pair for index, pair in measured.items() if pair is not None}
    if known and len(known) < len(layers):
        index = next(index for index, pair in measured.items() if pair is None)
        raise ModelLoadError(
            f"{measurements.path if measurements else ''}: layer {names.get(index, index)}: its k_cache and v_cache were not measured, "
            "and those of other layers were.",
            hint="Calibrate once more, or set [backend.gaudi] fp8_measurements to a file without any of them.",
        )
    digest = hashlib.blake2b(digest_size=16)
    scales = {}
    for layer in layers:
        pair = known.get(layer.index)
        keys, values = (
            (torch.ones(()), torch.ones(()))
            if pair is None
            else (activation_scale(maxabs, device, rounding=method.activations) for maxabs in pair)
        )
        digest.update(keys.numpy().tobytes() + values.numpy().tobytes())
        scales[layer.index] = CacheScales.of(keys, values, layer.dtype)
    logger.info("KV cache in fp8 (%s), scales %s.", device.name, "as measured" if known else "1")
    return tuple(attrs.evolve(layer, dtype=FP8) for layer in layers), scales, digest.hexdigest() if known else ""


def _measured(name: str, measurements: Measurements | None) -> tuple[float, float] | None:
    return None if measurements is None else measurements.cache_of(name)
