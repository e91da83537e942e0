"""Graphs on a CPU that keep the discipline of CUDA's, so that a test can see it broken.

What a CUDA graph has in common with this tape: Python runs once, while capturing; a replay runs the operations alone, on the very tensors
of then, so a number that Python chose stays what it was; a result has one place for ever. What is worse here than there, on purpose:
before a replay every temporary becomes NaN or nonsense, and an operation that reads memory which is neither a temporary of its own graph
nor declared to outlive it is refused. On a GPU that would be read after it was freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trencadis_torch.device import host_memory
from trencadis_torch.graphs.capture import Graph, Recorder, Run
from trencadis_torch.graphs.sync_guard import not_capturable, refusal, tensors_in

__all__ = ["CheckedRecorder"]


class CheckedRecorder(Recorder):
    """Records operations on a CPU.

    Args:
        lasting: Tensors that outlive every graph and keep their places.
    """

    def __init__(self, lasting: Iterable[torch.Tensor]) -> None:
        # The tensors are held: an address is nobody else's as long as they are there.
        self._lasting: dict[int, torch.Tensor] = {}
        self.lasts(*lasting)

    def lasts(self, *tensors: torch.Tensor) -> None:
        """Let graphs read and write these, too."""
        self._lasting.update((_place(one), one) for one in tensors)

    def rehearse(self, run: Run, *, what: str) -> int:
        """Record, and forget all but the size of the temporaries."""
        return self._record(run, what).num_bytes

    def capture(self, run: Run, *, what: str) -> Graph:
        """Record; the operations are run while they are recorded, which a device would not do."""
        return self._record(run, what)

    def _record(self, run: Run, what: str) -> _Tape:
        tape = _Tape(self._lasting, what)
        with tape:
            run()
        return tape

    def free_bytes(self) -> int:
        """Return the host's free memory."""
        return host_memory()[1]

    def close(self) -> None:
        """Free the shared memory."""
        self._lasting.clear()


@attrs.frozen(eq=False)
class _Operation:
    """One operation: its function, its arguments, and the results that are no views of these."""

    func: Any
    args: Sequence[Any]
    options: Mapping[str, Any]
    results: tuple[torch.Tensor | None, ...]


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations of one graph."""

    def __init__(self, lasting: Mapping[int, torch.Tensor], what: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lasting = lasting
        self._what = what
        self._operations: list[_Operation] = []
        self._own: dict[int, torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of the temporaries, as if none made room for another."""
        return sum(one.untyped_storage().nbytes() for one in self._own.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Check and record one operation; those made of others are taken apart first."""
        options = dict(kwargs or {})
        with self:
            parts = func.decompose(*args, **options)
        if parts is not NotImplemented:
            return parts
        reason = refusal(func, args, options) or self._stranger(args, options)
        if reason is not None:
            raise not_capturable(self._what, f"{func} {reason}")
        result = func(*args, **options)
        known = {_place(one) for one in tensors_in(args, options)}
        fresh = tuple(None if _place(one) in known else one for one in tensors_in(result))
        self._own.update((_place(one), one) for one in fresh if one is not None)
        mutates = func._schema.is_mutable  # noqa: SLF001 - nothing public says it
        if mutates or any(one is not None for one in fresh):
            self._operations.append(_Operation(func, args, options, fresh))
        return result

    def _stranger(self, args: Sequence[Any], options: Mapping[str, Any]) -> str | None:
        for one in tensors_in(args, options):
            if one.numel() and _place(one) not in self._own and _place(one) not in self._lasting:
                return f"reads a tensor {list(one.shape)} that was made outside and does not outlive the capture"
        return None

    def replay(self) -> None:
        """Make every temporary nonsense, then run the operations on the tensors of then."""
        for one in self._own.values():
            _spoil(one)
        for operation in self._operations:
            results = operation.func(*operation.args, **operation.options)
            for place, found in zip(operation.results, tensors_in(results), strict=True):
                if place is not None:
                    place.copy_(found)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _spoil(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)
