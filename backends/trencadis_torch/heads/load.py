"""Loads a head for a loaded model, and refuses what does not go with one."""

from __future__ import annotations

import logging
from typing import Any

import torch

from trencadis.errors import ConfigValueError, ModelLoadError
from trencadis_torch.heads.checkpoint import read_head
from trencadis_torch.heads.contract import Head
from trencadis_torch.heads.eagle import Eagle
from trencadis_torch.heads.mtp import MTP, load_mtp
from trencadis_torch.linear.native import Native
from trencadis_torch.loading.inspection import vocab_size
from trencadis_torch.loading.loader import ModelFiles

__all__ = ["check_head_serves", "load_head"]

logger = logging.getLogger("trencadis.torch")


def check_head_serves(*, layout: str, compiles: bool, num_ranks: int) -> None:
    """Refuse a head where it does not run.

    Args:
        layout: ``ragged`` or ``padded``.
        compiles: Graphs are made of the model.
        num_ranks: That divide the model.

    Raises:
        ConfigValueError: It does not run there.
    """
    obstacles = {
        f'[backend.torch] layout = "{layout}"': layout != "ragged",
        "[backend.torch] graphs": compiles,
        f"[parallel] {num_ranks} ranks": num_ranks > 1,
    }
    found = [what for what, holds in obstacles.items() if holds]
    if found:
        raise ConfigValueError(
            f"model.head does not go with {found[0]}: a head reads the hidden states of one rank, with ragged passes and without graphs.",
            hint='Leave model.head empty, or set backend.torch.layout = "ragged", without graphs, on one rank.',
        )


def load_head(
    path: str, files: ModelFiles, model: Any, *, native: Native | None, cache_dtype: torch.dtype | None
) -> tuple[Head, tuple[int, ...], str]:
    """Return a head, the numbers of the layers whose inputs it reads, and what tells it from other heads of the model.

    The number behind that of the last layer stands for what the last layer gives.

    Args:
        path: Directory of the head, or ``mtp``: it comes with the model.
        files: The model's.
        model: Model of transformers, loaded.
        native: Kernels for a CPU; None: PyTorch's.
        cache_dtype: Data type of keys and values in the cache; None: the one that is computed.

    Raises:
        ModelLoadError: It is of another kind, or was not made for such a model.
    """
    config = model.config.get_text_config(decoder=True)
    num_layers = int(config.num_hidden_layers)
    if path == MTP:
        mtp = load_mtp(files, model, cache_dtype=cache_dtype)
        logger.info("Head %s: the MTP layer of %s, from what its last layer gives.", path, files.source.path)
        return mtp, (num_layers,), MTP
    read = read_head(path, hidden_size=int(config.hidden_size), vocab_size=vocab_size(model))
    layers = read.state_layers or (2, num_layers // 2, num_layers - 3)
    if (
        len(layers) != read.num_states
        or min(layers) < 0
        or max(layers) >= num_layers
        or list(layers) != sorted(set(layers))
    ):
        raise ModelLoadError(
            f"model.head {path}: it reads what the layers {list(layers)} begin with, and the model has layers 0 to {num_layers - 1}.",
            hint="Name a head that was trained for this model in model.path.",
        )
    head = Eagle(read, model, layer_index=num_layers, native=native, cache_dtype=cache_dtype).eval()
    logger.info("Head %s: EAGLE-3, from what the layers %s begin with.", path, ", ".join(map(str, layers)))
    return head, layers, read.fingerprint
