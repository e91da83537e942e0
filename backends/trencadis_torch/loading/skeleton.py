"""A decoder without its weights: built without memory, its buffers as in a loaded one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trencadis.errors import ModelLoadError
from trencadis_torch.loading.loader import ModelFiles, read_generation_config

__all__ = ["BUILDING", "skeleton", "without_memory"]

BUILDING = threading.Lock()
"""transformers changes its classes while it loads a model, and ranks may be threads of one process."""


class _WithoutMemory(TorchFunctionMode):
    """Makes tensors without values, as those of parameters are, without memory, as a context and in this thread; any other is real."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is torch.empty:
            options = {**options, "device": "meta"}
        return func(*args, **options)


def without_memory(make: Callable[[], Any]) -> Any:
    """Return what a function of transformers makes, its large parameters without memory."""
    with BUILDING, _WithoutMemory():
        return make()


def skeleton(files: ModelFiles) -> Any:
    """Return a decoder whose large parameters have no memory, with its own eager attention; buffers are as in a loaded one.

    Args:
        files: The model.

    Raises:
        ModelLoadError: transformers cannot build it.
    """
    from transformers import AutoModelForCausalLM

    try:
        model = without_memory(
            lambda: AutoModelForCausalLM.from_config(
                files.config,
                dtype=torch.float32,
                attn_implementation="eager",
                trust_remote_code=files.source.trust_remote_code,
            )
        )
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ModelLoadError(f"{files.source.path} ({files.config.model_type}) cannot be built: {reason}") from error
    read_generation_config(model, files)
    return model
