"""The decoder layers of a model, called one by one on tokens that become fewer on the way.

The model itself begins: it embeds the tokens and calls its first layer, and there it is stopped. What it wanted to hand to that
layer is what every layer gets, cut to the tokens that are left.
"""

from __future__ import annotations

from typing import Any, NoReturn

import attrs
import torch

from trencadis.errors import BackendError
from trencadis_torch.attention.adapter import PASS_ARGUMENT, AttentionPass

__all__ = ["PartialForward", "Walkers"]


class _Stopped(Exception):  # noqa: N818 - nothing is wrong
    """Stops a forward, and carries the requested tensors out of it."""

    def __init__(self, *found: Any) -> None:
        self.found = found


@attrs.frozen(kw_only=True, eq=False)
class Walkers:
    """Tokens between two layers.

    Attributes:
        hidden: ``[1, T, hidden size]``.
        arguments: Further arguments of every layer.
    """

    hidden: torch.Tensor
    arguments: dict[str, Any]

    def only(self, kept: torch.Tensor) -> Walkers:
        """Return some of them. Pure.

        Args:
            kept: Indices, int64 ``[n]``.
        """
        length = self.hidden.shape[1]
        arguments = {name: _cut(value, kept, length) for name, value in self.arguments.items()}
        return Walkers(hidden=self.hidden.index_select(1, kept), arguments=arguments)


class PartialForward:
    """Calls layers.

    Args:
        model: Model of transformers, with the paged attention switched on.

    Raises:
        BackendError: The model's layers are not where they are looked for.
    """

    def __init__(self, model: Any) -> None:
        self._base = model.base_model
        layers = getattr(self._base, "layers", None)
        if not isinstance(layers, torch.nn.ModuleList) or not len(layers):
            raise BackendError(f"{type(self._base).__name__} has no list of layers (base_model.layers).")
        self._layers = layers

    def __len__(self) -> int:
        return len(self._layers)

    def begin(self, token_ids: torch.Tensor, positions: torch.Tensor) -> Walkers:
        """Return tokens in front of the first layer.

        Args:
            token_ids: int64 ``[T]``.
            positions: int64 ``[T]``.

        Raises:
            BackendError: The model does not call its layers with hidden states first.
        """
        handle = self._layers[0].register_forward_pre_hook(_stop, with_kwargs=True)
        try:
            self._base(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **{PASS_ARGUMENT: _Nobody()}
            )
        except _Stopped as stopped:
            (args, arguments) = stopped.found
        else:
            raise BackendError(f"{type(self._base).__name__} does not call its first layer.")
        finally:
            handle.remove()
        named = dict(arguments)
        hidden = args[0] if args else named.pop("hidden_states", None)
        if len(args) > 1 or not isinstance(hidden, torch.Tensor) or hidden.shape[:2] != (1, len(token_ids)):
            raise BackendError(f"{type(self._layers[0]).__name__} is not called with hidden states and names.")
        return Walkers(hidden=hidden, arguments=named)

    def look(self, index: int, walkers: Walkers) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values that a layer makes of tokens, ``[T, KV, D]`` each, and go no further."""
        try:
            self._call(index, walkers, _Looker())
        except _Stopped as stopped:
            keys, values = stopped.found
            return keys, values
        raise BackendError(f"Layer {index} of {type(self._base).__name__} does not attend.")

    def through(self, index: int, walkers: Walkers, attention: AttentionPass) -> Walkers:
        """Return tokens after a layer.

        Args:
            index: Index of the layer.
            walkers: In front of it.
            attention: Attends for them.
        """
        result = self._call(index, walkers, attention)
        return attrs.evolve(walkers, hidden=result if isinstance(result, torch.Tensor) else result[0])

    def _call(self, index: int, walkers: Walkers, attention: AttentionPass) -> Any:
        return self._layers[index](walkers.hidden, **{**walkers.arguments, PASS_ARGUMENT: attention})


class _Nobody:
    def attend(self, *_: Any, **__: Any) -> NoReturn:
        raise BackendError("attention before the first layer")


class _Looker:
    """Stops a layer where it would attend."""

    def attend(
        self, layer_index: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **_: Any
    ) -> NoReturn:
        raise _Stopped(keys, values)


def _stop(_: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> NoReturn:
    raise _Stopped(args, arguments)


def _cut(value: Any, kept: torch.Tensor, length: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_cut(one, kept, length) for one in value)
    if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[:2] == (1, length):
        return value.index_select(1, kept)
    return value
