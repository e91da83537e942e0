"""Runs the operations of the device and records them as in the vendor's lazy mode: the operations between two marks are one recipe.

A recipe is identified by its operations, the shapes and types of their tensors, and all numbers among their arguments. Whatever a graph
compiler would have to compile again is a new recipe here.

    operation ─▶ refused? ─▶ run on the CPU ─▶ narrowed (lazy mode) ─▶ taken down ─▶ tensors of the device

Sources: limits of HPU graphs, the vendor's documentation of HPU graphs for inference; narrow types, ``PT_ENABLE_INT64_SUPPORT`` of bridge
1.19 and ``backend/helpers/tensor_utils.cpp``, where complex types are refused, too.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch

from trencadis_gaudi.emulated.device import EmulatedDevice, EmulatedDeviceError
from trencadis_gaudi.emulated.dry_runs import DryRuns
from trencadis_gaudi.emulated.float8 import copy_by_index
from trencadis_gaudi.emulated.host_copies import HostCopies
from trencadis_gaudi.emulated.operations import Operation, operation_of, stable_sort_falls_back
from trencadis_gaudi.emulated.tensor import CPU, HpuTensor, active, is_hpu, register_device, wrap

__all__ = ["Recorder", "Recording"]

_NARROW = {torch.int64: torch.int32, torch.float64: torch.float32}
"""Types that lazy mode computes in a narrower one, although tensors report the wide type."""


class Recording:
    """Digest of the operations of one run.

    Attributes:
        num_operations: Number of operations.
        largest_bytes: Size of the largest result that is not a view of an argument, bytes.
    """

    def __init__(self) -> None:
        self.num_operations = 0
        self.largest_bytes = 0
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Add one operation."""
        self.num_operations += 1
        named = _describe(sorted(kwargs.items())) if kwargs else ""
        self._digest.update(f"{name}({_describe(args)};{named})".encode())
        for tensor in _tensors(result):
            num_bytes = tensor.numel() * tensor.element_size()
            # Views and in-place results take no memory; a view may even cover the whole KV cache.
            if num_bytes > self.largest_bytes and _storage(tensor) not in map(_storage, _tensors(args)):
                self.largest_bytes = num_bytes

    @property
    def key(self) -> bytes:
        """Digest of the operations so far."""
        return self._digest.digest()


class Recorder:
    """Runs the operations of an emulated device.

    Args:
        device: Device that compiles and counts.

    Attributes:
        host_copies: Copies to the host that are not complete.
    """

    def __init__(self, device: EmulatedDevice) -> None:
        self.host_copies = HostCopies()
        self._device = device
        self._open = Recording()
        self._graphs: list[Recording] = []
        self._dry = DryRuns()
        register_device(self)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make this the device of factory functions of this thread, within a ``with`` block."""
        token = active.set(self)
        try:
            yield
        finally:
            active.reset(token)

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation and record it."""
        operation = operation_of(func)
        if operation.name == "aten.to":  # a copy, a cast, or no operation, as PyTorch decides
            return func.decompose(*args, **kwargs)
        call = Call(args, kwargs)
        if operation.name == "aten.copy_" and not all(isinstance(one, HpuTensor) for one in args[:2]):
            return self._copy(call, *args, **kwargs)
        if operation.name == "aten._to_copy" and call.to_host:
            return self._to_host(call, kwargs)
        self._check(operation, call)
        # Outside lazy mode, graphs of torch.compile run unrecorded on the results of these operations.
        dry = self._device.compile_only and self._device.lazy and not operation.is_free and not operation.reads
        run = copy_by_index if operation.name == "aten.index_copy_" else func
        result = self._dry.run(func, call.args, call.kwargs) if dry else run(*call.args, **call.kwargs)
        if self._device.lazy and operation.computes:
            _narrow(result)
        if not operation.is_free:
            self._take(operation.name, call, result)
        return result if call.to_host else self._wrapped(operation, call, result)

    def mark(self) -> None:
        """End the run of operations, and compile its recipe if it is new."""
        run, self._open = self._open, Recording()
        if run.num_operations:
            self._device.num_mark_steps += 1
            self._device.touch(run.largest_bytes)
            self._device.need_recipe(run.key, what=f"A run of {run.num_operations} operations between two marks")

    def within_graph(self, call: Callable[[], Any]) -> tuple[Any, Recording]:
        """Return the result of ``call`` and its operations, which are recorded for a graph instead of the current run."""
        self.mark()
        recording = Recording()
        self._graphs.append(recording)
        try:
            return call(), recording
        finally:
            self._graphs.pop()

    def synchronize(self) -> None:
        """Wait for everything launched."""
        self.mark()
        self.host_copies.finish()

    # ---------------------------------------------------------------------------------------------------- copies

    def _copy(self, call: Call, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Copy between host and device."""
        if isinstance(target, HpuTensor):
            self._refuse_in_graph("aten.copy_", "it copies from the host")
            target.on_host.copy_(source)
            if self._device.lazy:
                _narrow(target.on_host)
            return target
        return self._fetch(target, call.args[1], non_blocking=non_blocking)

    def _to_host(self, call: Call, kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Copy to newly allocated host memory."""
        source: torch.Tensor = call.args[0]
        target = torch.empty_like(source, dtype=kwargs.get("dtype") or source.dtype)
        return self._fetch(target, source, non_blocking=kwargs.get("non_blocking", False))

    def _fetch(self, target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        self._refuse_in_graph("aten.copy_", "it copies to the host")
        self.mark()
        if non_blocking:
            return self.host_copies.start(target, source)
        self._device.num_host_syncs += 1
        self.host_copies.finish()
        return target.copy_(source)

    # -------------------------------------------------------------------------------------------------- one call

    def _check(self, operation: Operation, call: Call) -> None:
        name = operation.name
        if call.on_host:
            shape = tuple(call.on_host[0].shape)
            raise EmulatedDeviceError(f"{name} mixes tensors of the device with one of the CPU, of shape {shape}.")
        if operation.draws:
            raise EmulatedDeviceError(f"{name} draws random numbers on the device: they are not those of the CPU.")
        if not operation.has_kernel or stable_sort_falls_back(name, call.args, call.kwargs):
            self._refuse_in_graph(name, "it has no kernel and runs on the host")
            self._device.fall_back(name)
        if self._graphs and any(call.changes_view(place) for place in operation.written):
            self._refuse_in_graph(name, "it writes through a view")
        if operation.reads or operation.is_data_shaped or _is_masked_index(name, call.args):
            self._refuse_in_graph(
                name, "the host reads its result" if operation.reads else "its result's shape depends on data"
            )
            self._device.num_host_syncs += 1
            self.synchronize()

    def _refuse_in_graph(self, name: str, why: str) -> None:
        if self._graphs:
            raise EmulatedDeviceError(f"{name} cannot be part of a graph: {why}.")

    def _take(self, name: str, call: Call, result: Any) -> None:
        if self._graphs:
            self._graphs[-1].add(name, call.args, call.kwargs, result)
        elif self._device.lazy:
            self._open.add(name, call.args, call.kwargs, result)
        else:
            alone = Recording()
            alone.add(name, call.args, call.kwargs, result)
            self._device.touch(alone.largest_bytes)
            self._device.need_recipe(alone.key, what=f"The operation {name}")

    def _wrapped(self, operation: Operation, call: Call, result: Any) -> Any:
        if isinstance(result, torch.Tensor):
            known = call.wrappers.get(id(result))
            if known is not None:
                if known.shape != result.shape:
                    raise EmulatedDeviceError(f"{operation.name} changes the shape of its result.")
                return known
            if result.dtype.is_complex:
                raise EmulatedDeviceError(f"{operation.name} yields {result.dtype}: the device has no complex numbers.")
            base = call.base_of(result) if operation.may_alias else None
            if base is None:
                return wrap(result, self)
            is_view = base.is_view or operation.name not in {"aten.detach", "aten.alias"}
            # Only views of a tensor made outside inference mode may be tracked by PyTorch.
            with torch.inference_mode(base.is_inference()):
                return wrap(result, self, is_view=is_view)
        if isinstance(result, list | tuple):
            return type(result)(self._wrapped(operation, call, item) for item in result)
        return result


class Call:
    """Arguments of an operation, with inner CPU tensors in place of device tensors.

    Attributes:
        args: Arguments to run the operation with.
        kwargs: Keyword arguments to run the operation with.
        wrappers: Device tensors among the arguments, by identity of the inner CPU tensor.
        on_host: CPU tensors among the arguments, except single numbers.
        to_host: Whether a result on the CPU is requested.
    """

    __slots__ = ("args", "kwargs", "on_host", "to_host", "wrappers")

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.wrappers: dict[int, HpuTensor] = {}
        self.on_host: list[torch.Tensor] = []
        self.args: tuple[Any, ...] = tuple([self._within(value) for value in args])
        self.to_host = False
        self.kwargs: dict[str, Any] = {}
        for name, value in kwargs.items():
            if name == "device" and value is not None:
                self.to_host = not is_hpu(value)
                self.kwargs[name] = CPU
            else:
                self.kwargs[name] = self._within(value)

    def _within(self, value: Any) -> Any:
        if isinstance(value, HpuTensor):
            self.wrappers[id(value.on_host)] = value
            return value.on_host
        if isinstance(value, torch.Tensor):
            if value.dim():
                self.on_host.append(value)
            return value
        if isinstance(value, list | tuple):
            return [self._within(item) for item in value]
        return value

    def changes_view(self, place: int) -> bool:
        """Return whether the argument at ``place`` is a view. Pure."""
        return place < len(self.args) and any(
            self.wrappers[id(tensor)].is_view for tensor in _tensors(self.args[place]) if id(tensor) in self.wrappers
        )

    def base_of(self, result: torch.Tensor) -> HpuTensor | None:
        """Return the device tensor among the arguments that shares memory with a result, or None. Pure."""
        storage = _storage(result)
        return next((tensor for tensor in self.wrappers.values() if _storage(tensor.on_host) == storage), None)


def _narrow(result: Any) -> None:
    """Round results to the narrower type of lazy mode; integers wrap around."""
    for tensor in _tensors(result):
        narrow = _NARROW.get(tensor.dtype)
        if narrow is not None:
            tensor.copy_(tensor.to(narrow))


def _is_masked_index(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether the call is ``x[mask]`` or ``x[mask] = y``, whose size depends on the mask's values."""
    if name not in {"aten.index", "aten.index_put", "aten.index_put_"}:
        return False
    return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])


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
