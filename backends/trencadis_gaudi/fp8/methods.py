"""Scale methods of Intel Neural Compressor, and its JSON configuration, without torch, since the command line reads it.

| method | weights | activations |
|---|---|---|
| ``maxabs_hw`` | a scale per tensor, of the device's list | the same |
| ``maxabs_pow2`` | per tensor, a power of two | the same |
| ``maxabs_arbitrary`` | per tensor | the same |
| ``act_maxabs_hw_weights_pcs_maxabs_pow2`` | per output, a power of two | of the device's list |
| ``act_maxabs_pow2_weights_pcs_maxabs_pow2`` | per output, a power of two | a power of two |
| ``unit_scale`` | 1 | 1 |
| ``maxabs_pcs_pow2`` | per output, a power of two | per token, dynamic, a power of two |
| ``act_maxabs_pcs_pow2_weight_maxabs_pts_pow2_hw`` | per tensor, of the device's list | per token, dynamic, a power of two |

Source: intel/neural-compressor 9b47d09b, neural_compressor/torch/algorithms/fp8_quant: ``_core/scale_methods/scale_method_config.py``
(methods), ``_quant_common/quant_config.py`` (keys and file names), ``_core/utils.py`` (lists of names are searched for, as patterns).
"""

from __future__ import annotations

from typing import Any, Final

import attrs

from trencadis.errors import ConfigValueError
from trencadis.files import read_json

__all__ = ["DYNAMIC", "METHODS", "STATIC", "ScaleMethod", "read_quant_config"]


@attrs.frozen(kw_only=True)
class ScaleMethod:
    """Rule that computes scales from the largest magnitudes.

    Attributes:
        weights: Rounding of the scales of weights: ``hw``, ``pow2``, ``none`` or ``unit``.
        per_channel: Whether weights have a scale for each output.
        activations: Rounding of the scales of activations, with the same values.
    """

    weights: str
    per_channel: bool = False
    activations: str


STATIC: Final = {
    "maxabs_hw": ScaleMethod(weights="hw", activations="hw"),
    "maxabs_pow2": ScaleMethod(weights="pow2", activations="pow2"),
    "maxabs_arbitrary": ScaleMethod(weights="none", activations="none"),
    "act_maxabs_hw_weights_pcs_maxabs_pow2": ScaleMethod(weights="pow2", per_channel=True, activations="hw"),
    "act_maxabs_pow2_weights_pcs_maxabs_pow2": ScaleMethod(weights="pow2", per_channel=True, activations="pow2"),
    "unit_scale": ScaleMethod(weights="unit", activations="unit"),
}
"""The first is the default."""

DYNAMIC: Final = {
    "maxabs_pcs_pow2": ScaleMethod(weights="pow2", per_channel=True, activations="pow2"),
    "act_maxabs_pcs_pow2_weight_maxabs_pts_pow2_hw": ScaleMethod(weights="hw", activations="pow2"),
}
"""The first is the default."""

METHODS: Final = ("auto", *STATIC, *DYNAMIC)

_OBSERVERS = ("maxabs", "maxabs_per_channel")


def read_quant_config(path: str) -> dict[str, Any]:
    """Return the settings of ``[backend.gaudi]`` for a configuration of the quantiser, by name.

    Args:
        path: Path of the JSON file.

    Raises:
        ConfigValueError: The file cannot be read, or has a setting that this backend does not support.
    """
    try:
        table = read_json(path)
        if not isinstance(table, dict):
            raise ValueError("it is no JSON object.")
        return _settings(table)
    except (OSError, ValueError) as error:
        raise ConfigValueError(
            f'[backend.gaudi] quant_config = "{path}": {error}',
            hint='Correct the file, or set fp8 to "static", "dynamic" or "off": it is read for fp8 = "inc" alone.',
        ) from error


def _settings(table: dict[str, Any]) -> dict[str, Any]:
    """Return the settings for a configuration of the quantiser. Pure.

    Raises:
        ValueError: A setting is not supported by this backend.
    """
    _check(table)
    dynamic = _is_true(table.get("dynamic_quantization", False))
    known, method = DYNAMIC if dynamic else STATIC, str(table.get("scale_method", "maxabs_hw")).lower()
    if method not in known:
        kind = "dynamic" if dynamic else "static"
        raise ValueError(f"scale_method {method} is none of the {kind} ones here: {', '.join(known)}.")
    observer = str(table.get("observer", "maxabs"))
    if observer not in _OBSERVERS:
        raise ValueError(f"observer {observer} is none of {', '.join(_OBSERVERS)}.")
    return {
        "fp8": "dynamic" if dynamic else "static",
        "fp8_scale_method": method,
        "fp8_measurements": "" if dynamic else f"{table.get('dump_stats_path', 'stats')}_hooks_{observer}",
        "fp8_exclude": tuple(_names(table, "blocklist", "blacklist")),
    }


def _check(table: dict[str, Any]) -> None:
    mode = str(table.get("mode", "QUANTIZE")).upper()
    if mode != "QUANTIZE":
        raise ValueError(f"mode {mode} is not QUANTIZE; measure with the vendor's software.")
    if str(table.get("fp8_config", "E4M3")).upper() != "E4M3":
        raise ValueError(f"fp8_config {table['fp8_config']} is not E4M3.")
    if isinstance(table.get("scale_method"), dict):
        raise ValueError("scale_method differs between layers, which is not served.")
    if table.get("device_for_scales") is not None:
        raise ValueError("device_for_scales is not served: scales are those of the device that computes.")
    blocked, allowed = (_types(table, *names) for names in (("blocklist", "blacklist"), ("allowlist", "whitelist")))
    if any("Linear" in name for name in blocked):
        raise ValueError("blocklist.types names linear layers; name layers in blocklist.names instead.")
    if _names(table, "allowlist", "whitelist") or (allowed and not any("Linear" in name for name in allowed)):
        raise ValueError(
            "an allowlist other than of linear layers is not served; name layers in blocklist.names instead."
        )


def _names(table: dict[str, Any], *lists: str) -> list[str]:
    return [str(name) for key in lists for name in (table.get(key) or {}).get("names") or ()]


def _types(table: dict[str, Any], *lists: str) -> list[str]:
    return [str(name) for key in lists for name in (table.get(key) or {}).get("types") or ()]


def _is_true(value: Any) -> bool:
    return str(value).lower() == "true"
