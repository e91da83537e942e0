"""Properties of operations that decide how the device handles them, determined once for each operation."""

from __future__ import annotations

from functools import cache
from typing import Any

import attrs
import torch

from trencadis_gaudi.emulated.kernels import KERNELS, STABLE_SORT_LIMIT

__all__ = ["Operation", "operation_of", "stable_sort_falls_back"]


def _names(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names.split())


_HOST_READS = _names("_local_scalar_dense item equal is_nonzero")
_DATA_SHAPED = _names("nonzero masked_select _unique2 unique_dim unique_consecutive bincount")
"""Operations whose result the host reads, or whose shape depends on the values of their tensors."""

_FREE = _names(
    "_local_scalar_dense item detach alias lift_fresh empty empty_strided empty_like new_empty new_empty_strided"
)
"""Operations on names, memory and reads, which need no recipe."""

_DRAWS = _names(
    "bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal normal_ poisson rand rand_like randint "
    "randint_like randn randn_like random_ randperm uniform_"
)
_EXACT = _names(
    "argmax argmin argsort cat clamp clamp_ clone flip gather index index_copy index_copy_ index_put index_put_ index_select "
    "masked_fill masked_fill_ max maximum min minimum ones_like repeat roll scatter scatter_ sort stack topk where zeros_like zero_"
)
"""Operations whose results fit into the narrow type: they select existing values, or give small ones."""

_ALIASES = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")


@attrs.frozen(kw_only=True)
class Operation:
    """Properties of an operation.

    Attributes:
        name: Name without overload, such as ``aten.add``.
        reads: Whether the host reads its result.
        is_data_shaped: Whether the shape of its result depends on the values of its tensors.
        is_free: Whether it needs no recipe.
        draws: Whether it draws random numbers.
        computes: Whether its results may need a wider type than its arguments.
        has_kernel: Whether it runs on the device.
        may_alias: Whether its result may share memory with an argument.
        written: Indices of the arguments that it changes.
    """

    name: str
    reads: bool
    is_data_shaped: bool
    is_free: bool
    draws: bool
    computes: bool
    has_kernel: bool
    may_alias: bool
    written: tuple[int, ...]


@cache
def operation_of(func: Any) -> Operation:
    """Return the properties of an overload. Pure."""
    name, schema = str(func.overloadpacket), func._schema  # noqa: SLF001 - torch shows an operation's schema nowhere else
    infos = [argument.alias_info for argument in schema.arguments]
    short = name.removeprefix("aten.")
    may_alias = any(result.alias_info is not None for result in schema.returns)
    written = tuple(place for place, info in enumerate(infos) if info is not None and info.is_write)
    return Operation(
        name=name,
        reads=name in _HOST_READS,
        is_data_shaped=name in _DATA_SHAPED,
        is_free=name in _FREE,
        draws=name in _DRAWS,
        computes=name not in _EXACT and (bool(written) or not may_alias),
        has_kernel=short == name or short in KERNELS or any(_has_kernel(func, key) for key in _ALIASES),
        may_alias=may_alias,
        written=written,
    )


def _has_kernel(func: Any, key: str) -> bool:
    """Return whether PyTorch has a kernel of the operation for a dispatch key."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))  # noqa: SLF001 - the only way to ask


def stable_sort_falls_back(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a sort is stable and too long for the device. Pure.

    Args:
        name: Name of the operation.
        args: Arguments of the operation.
        kwargs: Keyword arguments of the operation.
    """
    if name != "aten.sort" or not kwargs.get("stable", False):
        return False
    tensor, dim = args[0], kwargs.get("dim", -1)
    return bool(dim % tensor.dim() == 0 or tensor.shape[dim] > STABLE_SORT_LIMIT)
