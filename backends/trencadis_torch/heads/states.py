"""Hidden states of a model that runs layer by layer: what some of its layers begin with, or the last one gives."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trencadis.errors import ModelLoadError

__all__ = ["LayerInputs"]


class LayerInputs:
    """Watches some layers of a model.

    Args:
        model: Model of transformers.
        layers: Their numbers; that behind the last one's stands for what the last layer gives.

    Raises:
        ModelLoadError: The model has no such layers in a row.
    """

    def __init__(self, model: Any, layers: tuple[int, ...]) -> None:
        self._found: dict[int, torch.Tensor] = {}
        self.layers = layers
        modules = decoder_layers(model)
        for number in layers:
            if number == len(modules):
                modules[-1].register_forward_hook(self._keep_given(number))
            else:
                modules[number].register_forward_pre_hook(self._keep(number), with_kwargs=True)

    def _keep_given(self, number: int) -> Any:
        def keep(_: nn.Module, __: tuple[Any, ...], given: Any) -> None:
            self._found[number] = given[0] if isinstance(given, tuple) else given

        return keep

    def _keep(self, number: int) -> Any:
        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._found[number] = args[0] if args else kwargs["hidden_states"]

        return keep

    @property
    def states(self) -> torch.Tensor:
        """States of the last forward, side by side, ``[T, layers × H]``."""
        return torch.cat([self._found[number].flatten(0, -2) for number in self.layers], -1)


def decoder_layers(model: Any) -> nn.ModuleList:
    """Return a decoder's layers.

    Raises:
        ModelLoadError: They are not one list.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == count]
    if len(lists) != 1:
        raise ModelLoadError("model.head: the layers of this model are not one list; a head cannot read their inputs.")
    return lists[0]
