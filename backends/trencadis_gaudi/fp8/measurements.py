"""Measurement files of Intel Neural Compressor: largest magnitudes of a calibration, by layer.

    {"Mode": "DynamicRange", "Nodes": {"model.layers.0.mlp.down_proj": {"inputs": [[[3.5]]], "params": {"weight": [[0.8]]}}, …}}

It writes the same content as ``.json`` and as ``.npz``, which is a pickle; only arrays are unpickled here.
Measurements made with vLLM use the names of its fused layers; the parts of a fused layer have the same input.

Source: intel/neural-compressor 9b47d09b, fp8_quant/_core/save_measure/save_files.py, _core/common.py and observer.py (shapes: ``(1, 1)``,
``(channels, 1)`` per channel); names, optimum-habana's modules and vllm-gaudi 091bbadd, attention/backends/hpu_attn.py.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import attrs
import numpy as np
from torch import nn

from trencadis.errors import ModelLoadError
from trencadis.files import is_file, read_json

__all__ = ["Measurements", "read_measurements"]

_ENDINGS: Final = ("", "_hooks_maxabs", "_hooks_maxabs_0_1", "_0_1")
_FUSED: Final = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
_CACHES: Final = ("", ".attn.impl", ".attn", ".impl")
"""Path from an attention module to the parent of its ``k_cache``, in optimum-habana and vLLM."""
_HINT: Final = (
    "[backend.gaudi] fp8_measurements must name a measurement of this model; fp8_exclude leaves layers as they are."
)


@attrs.frozen
class Measurements:
    """The nodes of a measurement file.

    Attributes:
        path: Path of the file, for messages.
        nodes: Measurements by name of the layer.
    """

    path: Path
    nodes: Mapping[str, Mapping[str, Any]]

    def input_of(self, name: str, linear: nn.Linear, *, is_part: bool = False) -> float:
        """Return the largest magnitude of a linear layer's input.

        Args:
            name: Name of the layer in the whole model.
            linear: Linear layer.
            is_part: Whether it is one rank's part of the layer, whose shape cannot be compared.

        Raises:
            ModelLoadError: The layer was not measured, or had another shape.
        """
        parent, _, last = name.rpartition(".")
        fused = f"{parent}.{_FUSED.get(last, last)}".lstrip(".")
        found = next((known for known in (name, fused) if known in self.nodes), None)
        if found is None:
            self.refuse(name, "it was not measured")
        if found == name and (weight := self.nodes[name].get("params", {}).get("weight")) is not None:
            self._largest(name, "the weight", weight, None if is_part else linear.out_features)
        return self._input(found, None if is_part else linear.in_features)

    def cache_of(self, attention: str) -> tuple[float, float] | None:
        """Return the largest magnitudes of keys and of values of an attention module; None if neither was measured.

        Raises:
            ModelLoadError: Only one of them was measured, or a value is not a magnitude.
        """
        for middle in _CACHES:
            names = [f"{attention}{middle}.{kind}_cache" for kind in "kv"]
            known = [name for name in names if name in self.nodes]
            if len(known) == 1:
                self.refuse(next(name for name in names if name not in known), "it was not measured")
            if known:
                keys, values = (self._input(name, 1) for name in names)
                return keys, values
        return None

    def refuse(self, name: str, why: str) -> NoReturn:
        """Refuse the file for a layer.

        Raises:
            ModelLoadError: Always.
        """
        raise ModelLoadError(f"{self.path}: layer {name}: {why}.", hint=_HINT)

    def _input(self, name: str, num_channels: int | None) -> float:
        inputs = self.nodes[name].get("inputs")
        if not isinstance(inputs, list | tuple) or len(inputs) != 1:
            self.refuse(name, "it has not one input")
        return self._largest(name, "its input", inputs[0], num_channels)

    def _largest(self, name: str, of: str, measured: Any, num_channels: int | None) -> float:
        try:
            magnitudes = np.asarray(measured, np.float64)
        except (TypeError, ValueError):
            self.refuse(name, f"the measurement of {of} is not of numbers")
        if num_channels is not None and magnitudes.size not in {1, num_channels}:
            self.refuse(name, f"the measurement of {of} is of {magnitudes.size} channels; the layer has {num_channels}")
        if not (np.isfinite(magnitudes).all() and (magnitudes >= 0).all()):
            self.refuse(name, f"the measurement of {of} is no magnitude: {magnitudes.ravel()[:3].tolist()}")
        return float(magnitudes.max())


def read_measurements(name: str) -> Measurements:
    """Return the measurements of a file.

    Args:
        name: Path of the file, or its prefix: ``dump_stats_path`` of the quantiser's configuration.

    Raises:
        ModelLoadError: The file does not exist, or is not a measurement of one card.
    """
    path = _find(name)
    cards = re.search(r"_\d+_(\d+)$", path.stem)
    if cards and cards[1] != "1":
        raise ModelLoadError(
            f"{path}: was measured by one of {cards[1]} cards, each of which saw a part of the model.",
            hint="Unify the files first, as step 5 of vllm-gaudi's calibration does.",
        )
    try:
        content = read_json(path, allows_infinity=True) if path.suffix == ".json" else _read_npz(path)
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise ModelLoadError(f"{path}: is no measurement file: {error}.", hint=_HINT) from error
    nodes = content.get("Nodes") if isinstance(content, dict) else None
    if not isinstance(nodes, dict) or not nodes or not all(isinstance(node, dict) for node in nodes.values()):
        raise ModelLoadError(f'{path}: is no measurement file: it has no "Nodes" with the layers.', hint=_HINT)
    return Measurements(path, nodes)


def _find(name: str) -> Path:
    tried = [Path(f"{name}{ending}{suffix}") for ending in _ENDINGS for suffix in ("", ".json", ".npz")]
    found = next((path for path in tried if path.suffix in {".json", ".npz"} and is_file(path)), None)
    if found is None:
        raise ModelLoadError(
            f"[backend.gaudi] fp8_measurements: there is no {name}, and no {name}_hooks_maxabs.json.",
            hint="Measure with the vendor's software: calibration/calibrate_model.sh of vllm-gaudi.",
        )
    return found


class _ArraysOnly(pickle.Unpickler):
    """Unpickler restricted to arrays of numbers and their containers, since a pickle can name any function."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "numpy" and name in {
            "_reconstruct",
            "_frombuffer",
            "ndarray",
            "dtype",
            "scalar",
        }:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it calls {module}.{name}")


def _read_npz(file: Path) -> Any:
    """Return the single object in an archive of ``numpy.savez``."""
    with zipfile.ZipFile(file) as archive, archive.open("arr_0.npy") as array:
        version = np.lib.format.read_magic(array)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        read(array)
        return _ArraysOnly(array).load().item()
