"""The format of a checkpoint, by its files and its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trencadis.gguf_file import read_gguf
from trencadis_torch.linear.formats.floats import FloatSource
from trencadis_torch.linear.formats.gguf import GgufSource
from trencadis_torch.linear.formats.mapped import MappedTensors, weight_files
from trencadis_torch.linear.formats.source import WeightSource

__all__ = ["open_source"]


def open_source(name: str, options: dict[str, Any], config: Any) -> WeightSource | None:
    """Return the weights of a checkpoint; None: its format is read by transformers alone.

    Args:
        name: Directory or hub id.
        options: What transformers would take with the name: ``gguf_file``, ``revision``.
        config: Its configuration, of transformers.

    Raises:
        ModelLoadError: A file is not what it says it is.
        OSError: Files are missing.
    """
    if "gguf_file" in options:
        return GgufSource(read_gguf(Path(name) / options["gguf_file"]), config)
    if getattr(config, "quantization_config", None) is not None:
        return None
    return FloatSource(MappedTensors(weight_files(name, revision=options.get("revision"))))
