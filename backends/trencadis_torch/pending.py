"""A submitted step whose results are being copied to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from trencadis.clock import Clock
from trencadis.errors import StepFailedError
from trencadis.records import Int32Array, RowError, StepOutput, TokenLogprobs
from trencadis_torch.prompt_logprobs import PromptLogprobs
from trencadis_torch.verify import Emitted

__all__ = ["StepTimer", "Timer", "TorchStep"]


class Timer(Protocol):
    """Measures a step where it runs; running when it is made."""

    @property
    def is_over(self) -> bool:
        """Whether ``wait`` would return at once; False where that cannot be asked."""
        ...

    def stop(self) -> None:
        """Mark the end of the launched work."""
        ...

    def wait(self) -> float:
        """Block until the end was reached and return the duration, s."""
        ...


class StepTimer:
    """Measures a step where it runs: with events on CUDA, with the clock on the CPU, which works inline.

    Args:
        device: Device of the step.
        clock: Read on the CPU.
    """

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self._clock = clock
        self._events: tuple[Any, Any] | None = None
        self._stream: Any = None
        if device.type == "cuda":
            event: Any = torch.cuda.Event
            self._events = (event(enable_timing=True), event(enable_timing=True))
            # Looked up once: it takes longer than to record.
            self._stream = torch.cuda.current_stream(device)
            self._events[0].record(self._stream)
        self._start_s = clock.now_s()
        self._seconds = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the end was reached."""
        return self._events is None or bool(self._events[1].query())

    def stop(self) -> None:
        """Mark the end of the launched work."""
        if self._events is not None:
            self._events[1].record(self._stream)
        self._seconds = self._clock.now_s() - self._start_s

    def wait(self) -> float:
        """Block until the end was reached and return the duration, s."""
        if self._events is None:
            return self._seconds
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3


class TorchStep:
    """Implements ``PendingStep``.

    Attributes:
        num_compilations: Programs compiled for the step; set by whoever knows.

    Args:
        num_sequences: Number of sequences of the plan.
        emitted: Tokens that each pass emits.
        prompts: Prompt scores of passes that have some.
        num_padded_tokens: Token positions computed.
        timer: Running; stopped here, after the copies to the host.
        step: Number of the batch.
        backend: Whose step it is, for errors.
        missed_layers: Whether a layer was computed before its KV was loaded; see ``StepOutput``.
    """

    def __init__(
        self,
        *,
        num_sequences: int,
        emitted: Sequence[Emitted],
        prompts: Sequence[PromptLogprobs],
        num_padded_tokens: int,
        timer: Timer,
        step: int = -1,
        backend: str = "torch",
        missed_layers: bool = False,
    ) -> None:
        self._num_sequences = num_sequences
        self._emitted = emitted
        # Launched with the step: a copy by the thread that waits would be part of whatever graph the device is given meanwhile.
        self._prompts = [one.moved(_to_host) for one in prompts]
        self._num_padded_tokens = num_padded_tokens
        self._on_host = [
            (
                None if one.token_ids is None else _to_host(one.token_ids),
                None if one.num_emitted is None else _to_host(one.num_emitted),
            )
            for one in emitted
        ]
        self._timer = timer
        self._step = step
        self._backend = backend
        self._missed_layers = missed_layers
        self.num_compilations = 0
        timer.stop()

    @property
    def is_done(self) -> bool:
        """Whether ``wait`` would return at once: on the CPU the step ran when it was submitted."""
        return self._timer.is_over

    def wait(self) -> StepOutput:
        """Block until the step is done and return its result; may be called from another thread.

        Raises:
            StepFailedError: The device reported an error.
        """
        try:
            device_s = self._timer.wait()
            counts = np.zeros(self._num_sequences, np.int32)
            tokens: dict[int, Int32Array] = {}
            errors: list[RowError] = []
            for one, (ids, numbers) in zip(self._emitted, self._on_host, strict=True):
                self._collect(one, ids, numbers, counts, tokens)
                errors += one.row_errors
                if ids is not None and one.token_ids.device.type != "cpu":  # on the CPU the engine's guard has looked
                    errors += _outside(one, ids.numpy(), counts)
                if one.late_errors is not None:
                    errors += one.late_errors()
            by_index = {error.index: error for error in errors}
            for index in by_index:
                counts[index] = 0
                del tokens[index]
            prompt_logprobs = [record for prompt in self._prompts for record in prompt.records()]
        except RuntimeError as failure:
            raise StepFailedError(f"backend {self._backend}: {failure}") from failure
        runs = [tokens[index] for index in sorted(tokens)]
        prompt_logprobs.sort(key=lambda record: (record.index, record.position))
        return StepOutput(
            token_ids=np.concatenate(runs) if runs else np.empty(0, np.int32),
            num_emitted=counts,
            logprobs=self._logprobs(counts),
            prompt_logprobs=tuple(prompt_logprobs),
            num_padded_tokens=self._num_padded_tokens,
            device_s=device_s,
            num_compilations=self.num_compilations,
            missed_layers=self._missed_layers,
            row_errors=tuple(by_index.values()),
            step=self._step,
        )

    @staticmethod
    def _collect(
        one: Emitted,
        ids: torch.Tensor | None,
        numbers: torch.Tensor | None,
        counts: Int32Array,
        tokens: dict[int, Int32Array],
    ) -> None:
        num_real = len(one.indices)
        table = np.empty((0, 1), np.int32) if ids is None else ids[:num_real].numpy().astype(np.int32)
        counts[one.indices] = 1 if numbers is None else numbers[:num_real].numpy()
        for index, row in zip(one.indices.tolist(), table, strict=True):
            tokens[index] = row[: counts[index]]

    def _logprobs(self, counts: Int32Array) -> tuple[TokenLogprobs, ...]:
        records = [
            TokenLogprobs(
                index=index,
                position=position,
                token_id=entry.token_id,
                logprob=entry.logprob,
                rank=entry.rank,
                top_token_ids=entry.top_token_ids,
                top_logprobs=entry.top_logprobs,
            )
            for one in self._emitted
            for index, step, position, entry in one.logprobs
            if step < counts[index]
        ]
        return tuple(sorted(records, key=lambda record: (record.index, record.position)))


def _outside(one: Emitted, ids: npt.NDArray[np.int64], counts: Int32Array) -> list[RowError]:
    """Return an error for each sequence with a token that the model does not know: only now they are on the host."""
    # As unsigned numbers negative ones are the largest: one comparison instead of two.
    wrong = ids[: len(one.indices)].view(np.uint64) >= one.vocab_size
    if not np.logical_or.reduce(wrong, axis=None):
        return []
    found = []
    for index, run, is_wrong in zip(one.indices.tolist(), ids, wrong, strict=False):
        outside = run[: counts[index]][is_wrong[: counts[index]]]
        if outside.size:
            message = f"{one.chosen_by}: it chose token {outside[0]}; the model knows 0 to {one.vocab_size - 1}"
            found.append(RowError(index=index, message=message))
    return found


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start a copy to pinned memory, where there is such; on the CPU the tensor is already there."""
    if tensor.device.type == "cpu":
        return tensor
    if tensor.device.type != "cuda":
        return tensor.to("cpu", non_blocking=True)
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return target.copy_(tensor, non_blocking=True)
