"""Which operations of PyTorch no CUDA graph can hold, found before anything is captured, and named.

A graph replays kernels with the addresses and sizes they were captured with. So no operation in it may bring a value to the host, have a
result whose shape depends on values, or copy between host and device.

Source: "CUDA Graphs, constraints", notes of PyTorch on CUDA semantics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trencadis.errors import BackendError

__all__ = ["SyncGuard", "not_capturable", "refusal", "tensors_in"]

_INDEXING = ("index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put", "_index_put_impl_")
_COPIES = ("copy_", "_to_copy")


class SyncGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises at operations within a ``with`` block that a capture could not hold.

    Args:
        what: Name of the captured part, for the error.

    Raises:
        BackendError: At the first such operation.
    """

    def __init__(self, what: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._what = what

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Check one operation; those made of others are taken apart first."""
        options = dict(kwargs or {})
        with self:
            parts = func.decompose(*args, **options)
        if parts is not NotImplemented:
            return parts
        reason = refusal(func, args, options)
        if reason is not None:
            raise not_capturable(self._what, f"{func} {reason}")
        result = func(*args, **options)
        reason = _crossing(func, args, options, result)
        if reason is not None:
            raise not_capturable(self._what, f"{func} {reason}")
        return result


def not_capturable(what: str, reason: str) -> BackendError:
    """Return the error that says why something cannot be captured. Pure."""
    return BackendError(
        f"[backend.torch] graphs: {what} cannot be captured: {reason}.",
        hint='Set [backend.torch] graphs = "off" to serve this model without graphs.',
    )


def refusal(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> str | None:
    """Return why a graph cannot hold an operation, from what goes into it; None: it may. Pure.

    Args:
        func: The operation, an ``OpOverload``.
        args: Positional arguments of the call.
        options: Keyword arguments of the call.
    """
    name = func.overloadpacket.__name__
    if name in _INDEXING:
        masks = [one for one in tensors_in(args[1], options.get("indices")) if one.dtype in (torch.bool, torch.uint8)]
        return "looks for what is set in a mask on the host" if masks else None
    if torch.Tag.data_dependent_output in func.tags:
        return "brings a value to the host"
    if torch.Tag.dynamic_output_shape in func.tags and options.get("output_size") is None:
        return "has a result whose size depends on values"
    return None


def _crossing(func: Any, args: Sequence[Any], options: Mapping[str, Any], result: Any) -> str | None:
    """Return why a graph cannot hold an operation that was run: it used memory of host and device; None: it did not."""
    found = list(tensors_in(args, options, result))
    if func.overloadpacket.__name__ not in _COPIES:
        # A number on the host is an argument of a kernel, like any other.
        found = [one for one in found if one.dim() or one.device.type != "cpu"]
    devices = {one.device.type for one in found}
    return f"copies between {' and '.join(sorted(devices))}" if len(devices) > 1 else None


def tensors_in(*trees: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments or results. Pure."""
    yield from (one for one in tree_leaves(trees) if isinstance(one, torch.Tensor))
