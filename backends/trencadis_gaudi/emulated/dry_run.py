"""An operation that is compiled and not run: its result has shape, type and strides, and no meaning.

    a view, a factory            runs: it computes nothing
    changes a tensor in place    returns that tensor as it is
    anything else                returns memory that nobody has written to

Source: PT_COMPILE_ONLY_MODE of the vendor's bridge, under which no recipe is launched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

__all__ = ["dry_run"]


def dry_run(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what stands for the result of an operation on CPU tensors.

    Args:
        func: An overload, as a dispatch mode is given it.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    schema = func._schema  # noqa: SLF001 - torch shows an operation's schema nowhere else
    if schema.is_mutable:
        return args[0] if _is_in_place(schema) else func(*args, **kwargs)
    if any(result.alias_info is not None for result in schema.returns) or not _has_tensor(args):
        return func(*args, **kwargs)
    try:
        result = func(*tree_map_only(torch.Tensor, _shape_of, args), **tree_map_only(torch.Tensor, _shape_of, kwargs))
    except NotImplementedError:
        return func(*args, **kwargs)  # its result's shape is not known without running it
    return tree_map_only(torch.Tensor, _unwritten, result)


def _is_in_place(schema: Any) -> bool:
    """Whether the first argument is changed, and is the result."""
    first = schema.arguments[0].alias_info
    returned = [result.alias_info for result in schema.returns]
    return first is not None and first.is_write and len(returned) == 1 and returned[0] is not None


def _has_tensor(args: tuple[Any, ...]) -> bool:
    return any(isinstance(item, torch.Tensor) or (isinstance(item, list) and _has_tensor(tuple(item))) for item in args)


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _unwritten(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
