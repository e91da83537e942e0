"""Tensors of the emulated device, which report the device ``hpu`` and hold an inner CPU tensor that nothing else may use.

Factories and copies to the device arrive through kernels registered here, other operations through the tensors themselves; all
reach the device's recorder. For torch.compile they are plain tensors of the device ``hpu``.
"""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from trencadis.errors import BackendError

__all__ = ["CPU", "HpuTensor", "OperationHandler", "current_handler", "hpu", "is_hpu", "register_device", "wrap"]

CPU = torch.device("cpu")


class OperationHandler(Protocol):
    """Runs the operations of one emulated device."""

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation with at least one tensor of the device among its arguments."""
        ...


class HpuTensor(torch.Tensor):
    """Tensor of an emulated device, made by :func:`wrap`.

    Attributes:
        on_host: Inner CPU tensor with the elements.
        handler: Handler that runs its operations.
        is_view: Whether it shares memory with a tensor of another shape.
    """

    on_host: torch.Tensor
    handler: OperationHandler
    is_view: bool

    # As documented for subclasses with __torch_dispatch__.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    @classmethod
    @_disable_dynamo  # after a graph break torch.compile would trace the operations between two graphs
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Dispatch an operation to the device of its first tensor."""
        found = _first(args)
        return (current_handler() if found is None else found.handler).dispatch(func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Return the name of the inner tensor, for torch.compile."""
        return ["on_host"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], context: None, size: Any, stride: Any) -> torch.Tensor:
        """Return the fake tensor of device ``hpu`` that torch.compile traces with."""
        fake = inner["on_host"]
        shape = torch.empty_strided(size, stride, dtype=fake.dtype, device="meta")
        return FakeTensor(fake.fake_mode, shape, hpu())

    def _is_view(self) -> bool:
        """Return False, since torch.compile cannot trace views of tensors with an inner tensor."""
        return False

    def tolist(self) -> Any:
        """Copy the elements to the host; PyTorch refuses this for subclasses."""
        return self.cpu().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the elements as text without counting a read by the host."""
        return f"HpuTensor({self.on_host!r})"


def wrap(tensor: torch.Tensor, handler: OperationHandler, *, is_view: bool = False) -> HpuTensor:
    """Return a device tensor that holds a CPU tensor."""
    wrapped: HpuTensor = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - as documented for subclasses
        HpuTensor,
        tensor.shape,
        strides=tensor.stride(),
        storage_offset=tensor.storage_offset(),
        dtype=tensor.dtype,
        device=hpu(),
    )
    wrapped.on_host = tensor
    wrapped.handler = handler
    wrapped.is_view = is_view
    return wrapped


def _first(args: Any) -> HpuTensor | None:
    for value in args:
        found = value if isinstance(value, HpuTensor) else _first(value) if isinstance(value, list | tuple) else None
        if found is not None:
            return found
    return None


def is_hpu(value: Any) -> bool:
    """Return whether an argument names the device. Pure."""
    if isinstance(value, str):
        return value.partition(":")[0] == "hpu"
    return isinstance(value, torch.device) and value.type == "hpu"


# ------------------------------------------------------------------------------------------------- registration

active: ContextVar[OperationHandler | None] = ContextVar("active", default=None)
"""Handler of the device on which factories of the current thread make tensors."""

_made: list[weakref.ref[OperationHandler]] = []


def current_handler() -> OperationHandler:
    """Return the handler active on this thread, else the one registered last."""
    return active.get() or [found for reference in _made if (found := reference()) is not None][-1]


@cache
def hpu() -> torch.device:
    """Return the device ``hpu:0``, registering its name first."""
    _register_once()
    return torch.device("hpu", 0)


def register_device(handler: OperationHandler) -> None:
    """Register the device ``hpu`` in this process with a handler.

    Raises:
        BackendError: The Gaudi software is loaded and has registered ``hpu``.
    """
    _register_once()
    _made[:] = [reference for reference in _made if reference() is not None] + [weakref.ref(handler)]


@cache
def _register_once() -> None:
    if hasattr(torch, "hpu"):
        raise BackendError(
            "The emulated device cannot be used beside the Gaudi software, which is loaded.",
            hint="Start the process with TORCH_DEVICE_BACKEND_AUTOLOAD=0.",
        )
    _setup_privateuseone_for_python_backend(rename="hpu", backend_module=_DeviceModule())
    global _library  # noqa: PLW0603 - kernels exist as long as the library object
    _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for func in _FACTORIES:
        _library.impl(func, partial(_make, func), "PrivateUse1")
    _library.impl("_copy_from", _copy_from, "PrivateUse1")


_ATEN = torch.ops.aten
_FACTORIES = (
    _ATEN.arange.default,
    _ATEN.arange.start,
    _ATEN.arange.start_step,
    _ATEN.empty.memory_format,
    _ATEN.empty_strided.default,
    _ATEN.eye.default,
    _ATEN.full.default,
    _ATEN.linspace.default,
    _ATEN.ones.default,
    _ATEN.scalar_tensor.default,
    _ATEN.zeros.default,
)
"""Factory operations; PyTorch composes all others of these."""

_library: Any = None


class _DeviceModule(_DummyBackendModule):
    """Module ``torch.hpu`` with the calls and types that PyTorch itself uses."""

    Stream = torch.Stream
    Event = torch.Event

    def _lazy_init(self) -> None:
        """Do nothing."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Return an empty state, since the device draws no random numbers."""
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Do nothing."""


@_disable_dynamo
def _make(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    made: torch.Tensor = current_handler().dispatch(func, args, kwargs)
    return made


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy to the device in calls that bypass tensor dispatch, such as ``torch.as_tensor``."""
    copied: torch.Tensor = current_handler().dispatch(_ATEN.copy_.default, (target, source, non_blocking), {})
    return copied
