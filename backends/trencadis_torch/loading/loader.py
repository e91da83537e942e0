"""From a directory, a hub id or a .gguf file to a model of transformers, in words when it cannot be.

Nothing is made up: weights that the files lack are an error here, where transformers would draw them at random.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from trencadis.errors import ModelLoadError, OutOfMemoryError
from trencadis.gguf_file import read_gguf
from trencadis.records import ModelSource
from trencadis_torch.device import DTYPES, choose_dtype
from trencadis_torch.linear.formats.choose import open_source, quantization_table, without_quantization
from trencadis_torch.linear.formats.source import WeightSource
from trencadis_torch.loading.gguf_config import gguf_config

__all__ = [
    "ModelFiles",
    "attends_in_every_layer",
    "check_architecture",
    "dtype_of",
    "find_model",
    "load_decoder",
    "load_weights",
    "load_whole",
    "locate",
    "own_code",
    "read_generation_config",
    "refuse_missing",
]

logger = logging.getLogger("trencadis.torch")

_RECURRENT = ("linear_attention", "mamba", "conv", "recurrent", "moe_linear", "hybrid")
_ATTENTION = frozenset({"full_attention", "sliding_attention", "attention"})


@attrs.frozen(kw_only=True)
class ModelFiles:
    """A model that was found, but not loaded.

    Attributes:
        source: Where it comes from and how it is to be held.
        name: Directory or hub id.
        options: Arguments for transformers besides the name.
        config: Configuration of the model.
    """

    source: ModelSource
    name: str
    options: dict[str, Any]
    config: Any


def find_model(source: ModelSource) -> ModelFiles:
    """Locate a model's files and read its configuration.

    Raises:
        ModelLoadError: Files are missing or cannot be read.
    """
    name, options = locate(source)
    return ModelFiles(source=source, name=name, options=options, config=_load_config(name, options, source))


def load_decoder(files: ModelFiles, device: torch.device) -> Any:
    """Return a decoder on a device, in evaluation mode, with its own eager attention.

    Args:
        files: The model.
        device: Where it goes.

    Raises:
        ModelLoadError: Weights are missing, or the architecture cannot be served; the message names which.
        OutOfMemoryError: No room for the weights.
    """
    from transformers import AutoModelForCausalLM

    check_architecture(files.config)
    return load_weights(files, device, AutoModelForCausalLM, attn_implementation="eager")


def load_whole(files: ModelFiles) -> Any:
    """Return a decoder on the CPU as its files have it, whose weights are to be divided.

    Args:
        files: The model.

    Raises:
        ModelLoadError: Weights are missing, or cannot be read.
        OutOfMemoryError: No room for the weights.
    """
    from transformers import AutoModelForCausalLM

    return _load_weights(files, AutoModelForCausalLM, "", {"attn_implementation": "eager"})


def load_weights(files: ModelFiles, device: torch.device, auto_class: Any, *, unused: str = "", **options: Any) -> Any:
    """Return a model of one of transformers' automatic classes on a device, in evaluation mode.

    Args:
        files: The model.
        device: Where it goes.
        auto_class: Such as ``AutoModel``.
        unused: First part of the names of weights that may be missing, as nothing uses them.
        options: More for ``from_pretrained``.

    Raises:
        ModelLoadError: Weights are missing, or cannot be read.
        OutOfMemoryError: No room for the weights.
    """
    source, model = files.source, _load_weights(files, auto_class, unused, options)
    dtype = choose_dtype(
        source.dtype, stored=_stored_dtype(model), device=device, num_parameters=model.num_parameters()
    )
    try:
        return model.to(device=device, dtype=dtype).eval().requires_grad_(False)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(f"{device} has no room for the weights of {source.path}: {error}") from error


def locate(source: ModelSource) -> tuple[str, dict[str, Any]]:
    """Return what transformers is to be told of a model: a directory or hub id, and options.

    Raises:
        ModelLoadError: There are no files where it is said to be.
    """
    path = Path(source.path)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelLoadError(f"{path}: no such file.")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        _check_directory(path)
        return str(path), {}
    if path.is_absolute() or source.path.startswith((".", "~")) or source.path.count("/") != 1:
        raise ModelLoadError(
            f"{source.path}: no such directory.",
            hint="Give a directory with config.json, a .gguf file, or a hub id such as Qwen/Qwen3-0.6B.",
        )
    return source.path, {"revision": source.revision or "main"}


def _check_directory(path: Path) -> None:
    if not (path / "config.json").is_file():
        raise ModelLoadError(
            f"{path}: no config.json there.", hint="A model directory has config.json and *.safetensors."
        )
    if any(path.glob("*.safetensors")):
        return
    others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in path.glob(pattern))
    found = f" Found {', '.join(others[:3])}." if others else ""
    raise ModelLoadError(
        f"{path}: no *.safetensors file there.{found}",
        hint="Weights are read from safetensors (pickled files can run code); give a .gguf file by its own path.",
    )


def _load_config(name: str, options: dict[str, Any], source: ModelSource) -> Any:
    if "gguf_file" in options:
        return gguf_config(read_gguf(Path(name) / options["gguf_file"]))
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=source.trust_remote_code, **options)
    except Exception as error:
        raise ModelLoadError(f"{source.path}: its config cannot be read: {_first_line(error)}") from error


def check_architecture(config: Any) -> None:
    """Refuse models that no paged KV cache can serve, before any weight is read.

    Raises:
        ModelLoadError: With the reason.
    """
    kind, text = config.model_type, config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise ModelLoadError(f"{kind} is an encoder-decoder model; only decoders and encoders are served.")
    if getattr(text, "add_cross_attention", False):
        raise ModelLoadError(f"{kind} has cross attention; only self-attention is served.")
    for layer, layer_type in enumerate(getattr(text, "layer_types", None) or ()):
        if any(word in layer_type for word in _RECURRENT):
            raise ModelLoadError(f"{kind}: layer {layer} is {layer_type}; recurrent state cannot be paged.")
        if layer_type not in _ATTENTION:
            raise ModelLoadError(f"{kind}: layer {layer} is {layer_type}, which is not supported.")
    _check_generates(config)


def attends_in_every_layer(config: Any) -> bool:
    """Return whether a configuration names the kind of each layer, and each is attention alone. Pure."""
    layer_types = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    return bool(layer_types) and _ATTENTION.issuperset(layer_types)


def _check_generates(config: Any) -> None:
    """Refuse a model that transformers cannot load as a causal language model.

    Raises:
        ModelLoadError: With what it is instead.
    """
    from transformers.models.auto import modeling_auto

    kind = config.model_type
    if kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or "AutoModelForCausalLM" in own_code(config):
        return
    if kind in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        raise ModelLoadError(
            f"{kind} is a model of images and text, of which transformers has no part for text alone.",
            hint="Only decoders of text are served; of some families there is a checkpoint for text alone.",
        )
    raise ModelLoadError(
        f"transformers has no causal language model of model_type {kind!r}.",
        hint="Only decoders of text and encoders are served; trust_remote_code = true admits code that comes with a model.",
    )


def dtype_of(config: Any) -> torch.dtype | None:
    """Return the dtype that a configuration names; None: it names none. Pure.

    Args:
        config: Configuration of transformers.
    """
    for one in (config, config.get_text_config(decoder=True)):
        if isinstance(getattr(one, "dtype", None), torch.dtype):
            found: torch.dtype = one.dtype
            return found
    return None


def own_code(config: Any) -> Collection[str]:
    """Return for which automatic classes a model brings code of its own. Pure.

    Args:
        config: Configuration of transformers.
    """
    return getattr(config, "auto_map", None) or ()


def _load_weights(files: ModelFiles, auto_class: Any, unused: str, options: dict[str, Any]) -> Any:
    source, config = files.source, files.config
    options = {**options, "output_loading_info": True}
    try:
        with _no_progress_bars():
            if "gguf_file" in files.options or quantization_table(config) is not None:
                model, report = _load_dequantised(files, auto_class, options)
            else:
                model, report = auto_class.from_pretrained(
                    files.name,
                    config=config,
                    dtype=source.dtype,
                    use_safetensors=True,
                    trust_remote_code=source.trust_remote_code,
                    **files.options,
                    **options,
                )
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(f"No room for the weights of {source.path}: {error}") from error
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(f"{source.path} ({config.model_type}) cannot be loaded: {_first_line(error)}") from error
    missing = sorted(map(str, [*report["missing_keys"], *report.get("mismatched_keys", ())]))
    refuse_missing(source.path, [name for name in missing if not unused or not name.startswith(unused)])
    return model


class _Dequantised:
    """A weight of a quantised checkpoint, made when transformers takes it: all of it, ``[...]``."""

    def __init__(self, source: WeightSource, name: str) -> None:
        self._source = source
        self._name = name

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self._source.tensor(self._name)


def _load_dequantised(files: ModelFiles, auto_class: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a model with the weights of a quantised checkpoint as floats, and what transformers reports.

    transformers itself would ask for a package of each format.
    """
    source = open_source(files.name, files.options, files.config)
    dtype = dtype_of(files.config) or source.dtype
    if files.source.dtype != "auto":
        dtype = DTYPES.get(files.source.dtype, dtype)
    logger.warning(
        "%s: %s. Loaded whole, it is dequantised to %s, which takes more memory than its files.",
        files.source.path,
        source.format,
        str(dtype).removeprefix("torch."),
    )
    config = without_quantization(files.config)
    with torch.device("meta"):  # an automatic class takes no weights without a name
        kind = type(auto_class.from_config(config, trust_remote_code=files.source.trust_remote_code))
    weights = {name: _Dequantised(source, name) for name in source.names()}
    model, report = kind.from_pretrained(None, config=config, dtype=dtype, state_dict=weights, **options)
    read_generation_config(model, files)
    return model, report


def read_generation_config(model: Any, files: ModelFiles) -> None:
    """Give a model that was made from its configuration what its files say of generation, if they say something."""
    from transformers import GenerationConfig

    if "gguf_file" in files.options:
        return  # a file is whole: what lies beside it is of another model
    with contextlib.suppress(OSError):
        revision = {name: value for name, value in files.options.items() if name == "revision"}
        model.generation_config = GenerationConfig.from_pretrained(files.name, **revision)


def refuse_missing(path: str, names: Sequence[str]) -> None:
    """Refuse a model whose files lack weights.

    Args:
        path: Path that was asked for.
        names: Names of the weights that are missing or of another shape.

    Raises:
        ModelLoadError: There are some.
    """
    if names:
        raise ModelLoadError(
            f"{path}: {len(names)} weights are missing or of another shape, {names[0]} for one.",
            hint="The files are incomplete, or config.json is of another model.",
        )


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _stored_dtype(model: Any) -> torch.dtype:
    dtype: torch.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    return dtype


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
