"""KV cache in fp8, with one scale for keys and one for values of each layer, measured or 1."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from trencadis_gaudi.flat_cache import CacheScales
from trencadis_gaudi.fp8.measurements import Measurements
from trencadis_gaudi.fp8.methods import ScaleMethod
from trencadis_gaudi.fp8.scales import FP8, Fp8Device, activation_scale
from trencadis_torch.cache.kv_cache import AttentionLayer

__all__ = ["cache_layers"]

logger = logging.getLogger("trencadis.gaudi")

_ATTENTION = re.compile(r"(attn|attention)$")
"""Names of modules with a cache layer; decoder layers may have a ``layer_idx`` too."""


def cache_layers(
    model: Any,
    layers: tuple[AttentionLayer, ...],
    device: Fp8Device,
    method: ScaleMethod,
    measurements: Measurements | None,
) -> tuple[tuple[AttentionLayer, ...], dict[int, CacheScales], str]:
    """Return the layers in fp8, their scales by index, and a digest of measured scales; an empty digest if all are 1.

    Args:
        model: Model of transformers.
        layers: Attention layers of the model.
        device: Fp8 range of the device.
        method: Scale method of the cache.
        measurements: Measured magnitudes of keys and values; None, or without the cache: scales are 1.

    Raises:
        ModelLoadError: Some layers were measured, and others not.
    """
    names = {getattr(part, "layer_idx", None): name for name, part in model.named_modules() if _ATTENTION.search(name)}
    known = {} if measurements is None else _measured(layers, names, measurements)
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


def _measured(
    layers: tuple[AttentionLayer, ...], names: Mapping[int | None, str], measurements: Measurements
) -> dict[int, tuple[float, float]]:
    """Return the largest magnitudes of keys and values of all layers; empty if none was measured."""
    found = {layer.index: measurements.cache_of(names.get(layer.index, "")) for layer in layers}
    known = {index: pair for index, pair in found.items() if pair is not None}
    if known and len(known) < len(found):
        missing = next(index for index in found if index not in known)
        measurements.refuse(
            names.get(missing, str(missing)),
            "its k_cache and v_cache were not measured, and those of other layers were",
        )
    return known
