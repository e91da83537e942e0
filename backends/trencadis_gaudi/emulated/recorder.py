"""Records every operation, as the vendor's lazy mode does: the operations between two marks are one recipe.

A recipe is identified by its operations, the shapes and types of their tensors, and every number written into it. Anything that a graph
compiler would have to compile anew is a new recipe here. With compilation only, operations are not run:

    a view, a factory            runs: it computes nothing
    changes a tensor in place    returns that tensor unchanged
    anything else                returns uninitialised memory of the right shape, type and strides

Source: PT_COMPILE_ONLY_MODE of the vendor's bridge, under which no recipe is launched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cache
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from trencadis_gaudi.emulated.device import EmulatedDevice, EmulatedDeviceError

__all__ = ["Recorder", "Recording", "DryRuns"]

_HOST_READS = frozenset({"aten._local_scalar_dense", "aten.item", "aten.equal", "aten.is_nonzero"})
_DATA_SHAPED = frozenset(
    {
        "aten.nonzero",
        "aten.masked_select",
        "aten._unique2",
        "aten.unique_dim",
        "aten.unique_consecutive",
        "aten.bincount",
    }
)
"""Operations whose result the host reads, and those whose shape depends on what is in their tensors."""

_FREE = frozenset({"aten.detach", "aten.alias", "aten.lift_fresh", "aten._to_copy", "aten.copy_", "aten.empty"})
"""Moves and names: on the device these are transfers, which need no recipe."""


class Recording:
    """The operations of one run, as a digest.

    Attributes:
        num_operations: How many.
        largest_bytes: Of the largest result that is no view of an argument.
    """

    def __init__(self) -> None:
        self.num_operations = 0
        self.largest_bytes = 0
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Take one operation."""
        self.num_operations += 1
        named = _describe(sorted(kwargs.items())) if kwargs else ""
        self._digest.update(f"{name}({_describe(args)};{named})".encode())
        for tensor in _tensors(result):
            num_bytes = tensor.numel() * tensor.element_size()
            # A view, or what is written in place, takes no memory of its own: the whole KV cache may be seen through one.
            if num_bytes > self.largest_bytes and _storage(tensor) not in map(_storage, _tensors(args)):
                self.largest_bytes = num_bytes

    @property
    def key(self) -> bytes:
        """Digest of the operations so far."""
        return self._digest.digest()


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Active while a backend works on an emulated device.

    Args:
        device: Compiles and counts.
    """

    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._open = Recording()
        self._graphs: list[Recording] = []
        self._dry = DryRuns()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch.compile runs where no recorder is active: to keep it out of each operation would cost more than taking that down.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation and take it down."""
        kwargs = kwargs or {}
        name = _name(func)
        self._refuse_or_flush(name, args)
        # Outside lazy mode graphs of torch.compile run unseen, on what these operations return.
        dry = self._device.compile_only and self._device.lazy and name not in _FREE and name not in _HOST_READS
        result = self._dry.run(func, args, kwargs) if dry else func(*args, **kwargs)
        if name not in _FREE:
            self._take(name, args, kwargs, result)
        return result

    def mark(self) -> None:
        """End the run of operations: compile it unless its recipe is there."""
        run, self._open = self._open, Recording()
        if run.num_operations:
            self._device.num_mark_steps += 1
            self._device.touch(run.largest_bytes)
            self._device.need_recipe(run.key, what=f"A run of {run.num_operations} operations between two marks")

    def within_graph(self, call: Callable[[], Any]) -> tuple[Any, Recording]:
        """Return the result of ``call`` and its operations, which belong to a graph and to no other run."""
        self.mark()
        recording = Recording()
        self._graphs.append(recording)
        try:
            return call(), recording
        finally:
            self._graphs.pop()

    def _take(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if self._graphs:
            self._graphs[-1].add(name, args, kwargs, result)
        elif self._device.lazy:
            self._open.add(name, args, kwargs, result)
        else:
            alone = Recording()
            alone.add(name, args, kwargs, result)
            self._device.touch(alone.largest_bytes)
            self._device.need_recipe(alone.key, what=f"The operation {name}")

    def _refuse_or_flush(self, name: str, args: tuple[Any, ...]) -> None:
        reads = name in _HOST_READS
        if not reads and name not in _DATA_SHAPED and not _is_masked_index(name, args):
            return
        if self._graphs:
            why = "the host reads its result" if reads else "its result's shape depends on data"
            raise EmulatedDeviceError(f"{name} cannot be part of a graph: {why}.")
        self._device.num_host_syncs += 1
        self.mark()


def _is_masked_index(name: str, args: tuple[Any, ...]) -> bool:
    """``x[mask]`` and ``x[mask] = y``: as many elements as the mask has ones."""
    if name not in {"aten.index", "aten.index_put", "aten.index_put_"}:
        return False
    return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])


@cache
def _name(func: Any) -> str:
    return str(func.overloadpacket)


def _describe(values: Iterable[Any]) -> str:
    return ",".join(
        [
            _describe_shape(value.shape, value.dtype)
            if isinstance(value, torch.Tensor)
            else f"[{_describe(value)}]"
            if isinstance(value, list | tuple)
            else repr(value)
            for value in values
        ]
    )


@cache
def _describe_shape(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{tuple(shape)}{dtype}"


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []


class DryRuns:
    """Operations that are not run. What shape an operation's result has is found out once for each kind of arguments, for all instances."""

    _results: ClassVar[dict[Hashable, Any]] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return a placeholder for the result of an operation on CPU tensors.

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
        key = (func, _kind(args), tuple((name, _kind(kwargs[name])) for name in sorted(kwargs)))
        if key not in self._results:
            try:
                self._results[key] = func(*_shapes_of(args), **_shapes_of(kwargs))
            except NotImplementedError:
                return func(*args, **kwargs)  # its result's shape is not known without running it
        result = self._results[key]
        return (
            _unwritten(result) if isinstance(result, torch.Tensor) else tree_map_only(torch.Tensor, _unwritten, result)
        )


def _kind(value: Any) -> Hashable:
    """Return the values that the shape of a result may depend on; numbers of two types are never equal."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_kind, value))
    return type(value), value


def _shapes_of(values: Any) -> Any:
    return tree_map_only(torch.Tensor, _shape_of, values)


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
