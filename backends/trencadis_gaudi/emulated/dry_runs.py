"""Dry runs of operations: results have the right shape, type and strides, and arbitrary values.

    a view, a factory            runs: it computes nothing
    changes a tensor in place    returns that tensor unchanged
    anything else                returns uninitialised memory

Source: PT_COMPILE_ONLY_MODE of the vendor's bridge, which launches no recipe.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_map_only

__all__ = ["DryRuns"]


class DryRuns:
    """Returns placeholders for results; the shape of a result is determined once for each kind of arguments, for all instances."""

    _results: ClassVar[dict[Hashable, Any]] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return a placeholder for the result of an operation on CPU tensors.

        Args:
            func: Operator overload, as passed to a dispatch mode.
            args: Arguments of the operation.
            kwargs: Keyword arguments of the operation.
        """
        schema = func._schema  # noqa: SLF001 - torch shows an operation's schema nowhere else
        if schema.is_mutable:
            return args[0] if _is_in_place(schema) else func(*args, **kwargs)
        if any(result.alias_info is not None for result in schema.returns) or not _has_tensor(args):
            return func(*args, **kwargs)
        key = (func, _kind(args), tuple((name, _kind(kwargs[name])) for name in sorted(kwargs)))
        if key not in self._results:
            try:
                self._results[key] = func(*_shapes_of(args), **_shapes_of(kwargs))
            except NotImplementedError:
                return func(*args, **kwargs)  # the shape of the result is not known without running it
        result = self._results[key]
        return (
            _unwritten(result) if isinstance(result, torch.Tensor) else tree_map_only(torch.Tensor, _unwritten, result)
        )


def _kind(value: Any) -> Hashable:
    """Return a key of the values that the shape of a result may depend on, with their types."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_kind, value))
    return type(value), value


def _shapes_of(values: Any) -> Any:
    return tree_map_only(torch.Tensor, _shape_of, values)


def _is_in_place(schema: Any) -> bool:
    """Return whether the operation changes and returns its first argument."""
    first = schema.arguments[0].alias_info
    returned = [result.alias_info for result in schema.returns]
    return first is not None and first.is_write and len(returned) == 1 and returned[0] is not None


def _has_tensor(args: tuple[Any, ...]) -> bool:
    return any(isinstance(item, torch.Tensor) or (isinstance(item, list) and _has_tensor(tuple(item))) for item in args)


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _unwritten(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
