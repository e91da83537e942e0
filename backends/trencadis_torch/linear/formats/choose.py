"""The format of a checkpoint, by its files and its configuration."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from trencadis.errors import ModelLoadError
from trencadis.gguf_file import read_gguf
from trencadis_torch.device import DTYPES
from trencadis_torch.linear.formats.awq import AwqSource
from trencadis_torch.linear.formats.bitsandbytes import BitsAndBytesSource
from trencadis_torch.linear.formats.compressed_tensors import CompressedTensorsSource
from trencadis_torch.linear.formats.floats import FloatSource
from trencadis_torch.linear.formats.fp8 import FbgemmFp8Source, Fp8Source
from trencadis_torch.linear.formats.gguf import GgufSource
from trencadis_torch.linear.formats.gptq import GptqSource
from trencadis_torch.linear.formats.mapped import MappedTensors, weight_files
from trencadis_torch.linear.formats.mxfp4 import Mxfp4Source
from trencadis_torch.linear.formats.quantised import QuantisedSource
from trencadis_torch.linear.formats.source import WeightSource

__all__ = ["FORMATS", "open_source", "quantization_table", "source_class", "without_quantization"]

FORMATS: Final[tuple[type[QuantisedSource], ...]] = (
    AwqSource,
    BitsAndBytesSource,
    CompressedTensorsSource,
    FbgemmFp8Source,
    Fp8Source,
    GptqSource,
    Mxfp4Source,
)
"""Formats of quantised weights; a new one is a module beside this one, and a place here."""

_KEYS: Final = ("quantization_config", "compression_config")
"""Tables of a configuration; the second is that of older checkpoints of compressed-tensors."""


def open_source(name: str, options: dict[str, Any], config: Any) -> WeightSource:
    """Return the weights of a checkpoint.

    Args:
        name: Directory or hub id.
        options: Arguments of ``from_pretrained``: ``gguf_file``, ``revision``.
        config: Configuration of the checkpoint, of transformers.

    Raises:
        ModelLoadError: A file is not what it says it is, or weights are quantised in a way that is not served.
        OSError: Files are missing.
    """
    if "gguf_file" in options:
        return GgufSource(read_gguf(Path(name) / options["gguf_file"]), config)
    table = quantization_table(config)
    chosen = None if table is None else source_class(table, name)
    tensors = MappedTensors(weight_files(name, revision=options.get("revision")))
    if table is not None and chosen is not None:
        return chosen(tensors, table, path=name, dtype=_dtype(config))
    _check_floats(tensors.names(), name)
    return FloatSource(tensors)


def quantization_table(config: Any) -> Mapping[str, Any] | None:
    """Return what a model's configuration says of its quantisation; None: nothing. Pure.

    Args:
        config: Configuration of transformers.
    """
    for one in (config, config.get_text_config(decoder=True)):
        for key in _KEYS:
            table = getattr(one, key, None)
            if table is not None:
                found: Mapping[str, Any] = table if isinstance(table, Mapping) else table.to_dict()
                return found
    return None


def without_quantization(config: Any) -> Any:
    """Return a copy of a configuration that says nothing of quantisation. Pure.

    Args:
        config: Configuration of transformers.
    """
    plain = copy.deepcopy(config)
    for one in (plain, plain.get_text_config(decoder=True)):
        for key in _KEYS:
            vars(one).pop(key, None)
    return plain


def source_class(table: Mapping[str, Any], path: str) -> type[QuantisedSource]:
    """Return what reads a format.

    Args:
        table: ``quantization_config``.
        path: Model, for messages.

    Raises:
        ModelLoadError: Nothing does.
    """
    chosen = next((one for one in FORMATS if one.reads(table)), None)
    if chosen is None:
        raise ModelLoadError(
            f"{path}: quantization_config.quant_method is {table.get('quant_method')!r}, which is not served; "
            f"served are {', '.join(sorted(one.method for one in FORMATS))}.",
            hint="Take a checkpoint of the same model in one of these formats, in GGUF, or one of floats.",
        )
    return chosen


def _check_floats(names: Iterable[str], path: str) -> None:
    """Refuse files of quantised weights whose configuration says nothing of it.

    Raises:
        ModelLoadError: With the name of one.
    """
    marks = tuple(mark for one in FORMATS for mark in one.marks)
    found = next((name for name in sorted(names) if name.endswith(marks)), None)
    if found is not None:
        raise ModelLoadError(
            f"{path}: the files have {found}, a part of a quantised weight, and config.json has no quantization_config.",
            hint="Copy the table of quantize_config.json (GPTQ) or quant_config.json (AWQ) to config.json, with quant_method.",
        )


def _dtype(config: Any) -> torch.dtype:
    """Return the model's data type by its configuration; bfloat16 where it says nothing. Pure."""
    dtype = getattr(config.get_text_config(decoder=True), "dtype", None) or getattr(config, "dtype", None)
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    return found if isinstance(found, torch.dtype) else torch.bfloat16
