"""Loads one rank's share of a decoder: built without memory, divided, then given its parts of the weights."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch.overrides import TorchFunctionMode

from trencadis.errors import ModelLoadError, OutOfMemoryError
from trencadis.interfaces import RankGroups
from trencadis_torch.device import choose_dtype
from trencadis_torch.loading.loader import ModelFiles, check_architecture, load_whole
from trencadis_torch.parallel.placement import ExpertPlacement
from trencadis_torch.parallel.reading import (
    READ_IN_PARTS,
    LoadedWeights,
    StoredWeights,
    Weights,
    materialise,
    missing,
)
from trencadis_torch.parallel.sharding import Sharding, keep_whole, shard
from trencadis_torch.parallel.stages import cut_stage

__all__ = ["load_share", "skeleton"]

logger = logging.getLogger("trencadis.torch")


_BUILDING = threading.Lock()
"""transformers changes its classes while it loads a model, and ranks may be threads of one process."""

ALIGNMENT = 16
"""Bytes of which a row of an expert's weights must be a multiple for PyTorch's grouped products; of others the experts run one by one."""


class _WithoutMemory(TorchFunctionMode):
    """As a context, in this thread: tensors that are made without values have no memory, as those of parameters; any other is real."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is torch.empty:
            options = {**options, "device": "meta"}
        return func(*args, **options)


def skeleton(files: ModelFiles) -> Any:
    """Return a decoder whose large parameters have no memory, with its own eager attention; buffers are as in a loaded one.

    Args:
        files: The model.

    Raises:
        ModelLoadError: transformers cannot build it.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    try:
        with _BUILDING, _WithoutMemory():
            model = AutoModelForCausalLM.from_config(
                files.config,
                dtype=torch.float32,
                attn_implementation="eager",
                trust_remote_code=files.source.trust_remote_code,
            )
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ModelLoadError(f"{files.source.path} ({files.config.model_type}) cannot be built: {reason}") from error
    with contextlib.suppress(OSError):
        revision = {name: value for name, value in files.options.items() if name == "revision"}
        model.generation_config = GenerationConfig.from_pretrained(files.name, **revision)
    return model


def load_share(
    files: ModelFiles,
    device: torch.device,
    groups: RankGroups,
    configured: dict[str, str],
    *,
    experts: ExpertPlacement | None = None,
) -> tuple[Any, Sharding]:
    """Return one rank's share of a decoder, in evaluation mode, and what was divided how.

    Args:
        files: The model.
        device: Where it goes.
        groups: The ranks; nothing is exchanged.
        configured: Styles from the configuration.
        experts: Where whole experts are; None: each rank has a share of every expert.

    Raises:
        ConfigValueError: The configuration names what is not there.
        ModelLoadError: The model cannot be divided so, or weights are missing.
        OutOfMemoryError: No room for the weights.
    """
    check_architecture(files.config)
    model, layout, group = skeleton(files), groups.layout, groups.tensor
    if layout.tensor > 1:
        sharding = shard(model, group, configured, experts=experts, own_tokens=layout.attention == "data")
    else:
        sharding = keep_whole(model)
    if layout.pipeline > 1:
        layers = cut_stage(model, groups)
        here = {id(parameter) for parameter in model.parameters()}
        pieces = {key: piece for key, piece in sharding.pieces.items() if key in here}
        sharding = attrs.evolve(sharding, pieces=pieces, layers=layers)
    stored = _stored(files, model, sharding)
    try:
        if stored is None:
            with _BUILDING:
                whole = load_whole(files)
            weights: Weights = LoadedWeights(whole)
            found = next(one.dtype for one in whole.parameters() if one.is_floating_point())
            _check_complete(model, sharding, weights, files)
        else:
            weights, found = stored, _dtype_of(files.config) or stored.dtype()
        dtype = choose_dtype(files.source.dtype, stored=found, device=device, num_parameters=sharding.num_parameters)
        materialise(model, sharding.pieces, weights, dtype=dtype, device=device)
        if any(width * dtype.itemsize % ALIGNMENT for width in sharding.expert_widths):
            model.set_experts_implementation("eager")
        if stored is not None:
            mib = stored.num_bytes / 2**20
            logger.info("Rank %d of %d read %.1f MiB of weights.", groups.rank, layout.num_ranks, mib)
        return model.to(device=device, dtype=dtype).eval().requires_grad_(False), sharding
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(f"{device} has no room for the weights of {files.source.path}: {error}") from error
    finally:
        if stored is not None:
            stored.close()


def _stored(files: ModelFiles, model: Any, sharding: Sharding) -> StoredWeights | None:
    """Return the files to read parts of, or None where transformers has to load them whole."""
    reason = ""
    if files.config.model_type not in READ_IN_PARTS:
        reason = f"files of {files.config.model_type} were not tried"
    elif "gguf_file" in files.options or getattr(files.config, "quantization_config", None) is not None:
        reason = "they are quantised"
    stored = None
    if not reason:
        try:
            stored = StoredWeights(files)
            names = missing(model, sharding.pieces, stored)
            reason = f"{names[0]} is not in them" if names else ""
        except Exception as error:  # of safetensors, or of the hub
            reason = f"{type(error).__name__}: {error}"
    if not reason:
        return stored
    if stored is not None:
        stored.close()
    logger.warning("Each rank reads all weights of %s, and keeps its part: %s.", files.source.path, reason)
    return None


def _check_complete(model: Any, sharding: Sharding, weights: Weights, files: ModelFiles) -> None:
    names = missing(model, sharding.pieces, weights)
    if names:
        raise ModelLoadError(
            f"{files.source.path}: as transformers loads it, it has no weight {names[0]}, which a share of it needs.",
            hint="A model that is quantised in its files cannot be divided; set [parallel] tensor = 1.",
        )


def _dtype_of(config: Any) -> torch.dtype | None:
    for one in (config, config.get_text_config(decoder=True)):
        if isinstance(getattr(one, "dtype", None), torch.dtype):
            found: torch.dtype = one.dtype
            return found
    return None
