"""Loads one rank's share of a decoder: built without memory, divided, then given its parts of the weights."""

from __future__ import annotations

import logging
from typing import Any

import attrs
import torch

from trencadis.errors import ModelLoadError, OutOfMemoryError
from trencadis.interfaces import RankGroups
from trencadis_torch.device import choose_dtype
from trencadis_torch.loading.loader import ModelFiles, check_architecture, dtype_of, load_whole
from trencadis_torch.loading.skeleton import BUILDING, skeleton
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

__all__ = ["divide", "load_share", "run_experts_one_by_one"]

logger = logging.getLogger("trencadis.torch")

ALIGNMENT = 16
"""Bytes of which a row of an expert's weights must be a multiple for PyTorch's grouped products; of others the experts run one by one."""


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
    model = skeleton(files)
    sharding = divide(model, groups, configured, experts=experts)
    stored = _stored(files, model, sharding)
    try:
        if stored is None:
            with BUILDING:
                whole = load_whole(files)
            weights: Weights = LoadedWeights(whole)
            found = next(one.dtype for one in whole.parameters() if one.is_floating_point())
            _check_complete(model, sharding, weights, files)
        else:
            weights, found = stored, dtype_of(files.config) or stored.dtype()
        dtype = choose_dtype(files.source.dtype, stored=found, device=device, num_parameters=sharding.num_parameters)
        materialise(model, sharding.pieces, weights, dtype=dtype, device=device)
        run_experts_one_by_one(model, sharding, dtype)
        if stored is not None:
            mib = stored.num_bytes / 2**20
            logger.info("Rank %d of %d read %.1f MiB of weights.", groups.rank, groups.layout.num_ranks, mib)
        return model.to(device=device, dtype=dtype).eval().requires_grad_(False), sharding
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(f"{device} has no room for the weights of {files.source.path}: {error}") from error
    finally:
        if stored is not None:
            stored.close()


def divide(
    model: Any, groups: RankGroups, configured: dict[str, str], *, experts: ExpertPlacement | None = None
) -> Sharding:
    """Make a model one rank's share, in place; returns what was divided how.

    Args:
        model: Model as transformers builds it, its parameters without memory.
        groups: The ranks; nothing is exchanged.
        configured: Styles from the configuration.
        experts: Where whole experts are; None: each rank has a share of every expert.

    Raises:
        ConfigValueError: The configuration names what is not there.
        ModelLoadError: The model cannot be divided so.
    """
    layout = groups.layout
    if layout.tensor > 1:
        own_tokens = layout.attention == "data"
        sharding = shard(model, groups.tensor, configured, experts=experts, own_tokens=own_tokens)
    else:
        sharding = keep_whole(model)
    if layout.pipeline == 1:
        return sharding
    whole = list(
        model.parameters()
    )  # kept until stages are cut, so that no new parameter gets the id of one that is gone
    layers = cut_stage(model, groups)
    here = {id(parameter) for parameter in model.parameters()}.intersection(map(id, whole))
    pieces = {key: piece for key, piece in sharding.pieces.items() if key in here}
    return attrs.evolve(sharding, pieces=pieces, layers=layers)


def run_experts_one_by_one(model: Any, sharding: Sharding, dtype: torch.dtype) -> None:
    """Let the experts of a share run one by one, if PyTorch's grouped products do not take their sizes.

    Args:
        model: The share.
        sharding: How the model was divided.
        dtype: Data type of the experts' weights.
    """
    if any(width * dtype.itemsize % ALIGNMENT for width in sharding.expert_widths):
        model.set_experts_implementation("eager")


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
            hint="The files are incomplete, or config.json is of another model.",
        )
