"""What the executor suite hands to an executor: fakes whose behaviour shows in what comes back, also from another process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from trencadis.errors import BackendError
from trencadis.interfaces import (
    AllocationPlan,
    BlockCopies,
    KVWorkerSide,
    PendingStep,
    Sampler,
    SupportsRemoteScheduler,
)
from trencadis.records import (
    Batch,
    Bucket,
    ConnectorReport,
    Float32Array,
    Int32Array,
    KVLayout,
    MemoryReport,
    ModelFacts,
    ModelSource,
    Pass,
    RowStart,
    SamplingParams,
    StepOutput,
    TableWrites,
)
from trencadis_testing.fakes import FakeBackend

__all__ = [
    "CLOSED",
    "POISON",
    "BlockedBackends",
    "FramingWorker",
    "Gate",
    "JoiningWorker",
    "QuietWorker",
    "RaisingWorker",
    "TellingBackend",
    "TellingSampler",
    "make_backend",
    "make_sampler",
    "no_tokens",
    "one_token",
    "plan_of",
]

POISON = 13
"""A batch that starts a row with this token fails in ``submit``; with one more, in ``wait``."""

_MOST_RANKS = 64

CLOSED = "closed"
"""A backend whose model has a path with this last part writes a line to it when it is closed."""


def plan_of(connector: KVWorkerSide | None = None) -> AllocationPlan:
    """Return a small plan. Pure."""
    return AllocationPlan(
        num_blocks=32,
        block_size=4,
        num_rows=3,
        max_model_len=64,
        max_num_batched_tokens=64,
        connector=connector,
        num_host_blocks=16,
    )


def one_token(token: int, *, message: bytes = b"") -> Batch:
    """Return a batch that starts row 0 with one token and computes it into block 0; nothing is emitted. Pure."""
    zero: Int32Array = np.zeros(1, np.int32)
    one: Int32Array = np.ones(1, np.int32)
    start = RowStart(row=0, token_ids=np.array([token], np.int32), num_prompt_tokens=1, params=SamplingParams(), seed=0)
    compute = Pass(
        bucket=Bucket(1, 1, 0),
        indices=zero,
        rows=zero,
        starts=zero,
        query_lens=one,
        num_logits=zero,
        num_prompt_logits=zero,
    )
    return Batch(
        step=0,
        num_sequences=1,
        row_starts=(start,),
        table_writes=TableWrites(rows=zero, columns=zero, block_ids=zero),
        passes=(compute,),
        connector_message=message,
    )


def no_tokens() -> Batch:
    """Return a batch that computes nothing. Pure."""
    none: Int32Array = np.empty(0, np.int32)
    writes = TableWrites(rows=none, columns=none, block_ids=none)
    return Batch(step=0, num_sequences=0, row_starts=(), table_writes=writes, passes=())


def make_backend(rank: int) -> TellingBackend:
    """Make the backend of a rank; can be pickled."""
    return TellingBackend(rank)


def make_sampler(rank: int) -> TellingSampler:
    """Make the sampler of a rank; can be pickled."""
    return TellingSampler(rank)


class TellingBackend(FakeBackend):
    """Computes in ``submit``, and tells what reached it through what it returns.

    Args:
        rank: Rank that the executor gives it.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(eos=-1)
        self._rank = rank
        self._mark = Path()

    def load(self, source: ModelSource, *, sampler: Sampler) -> ModelFacts:
        """Return facts whose architecture names path, rank and sampler."""
        self._mark = Path(source.path)
        facts = super().load(source, sampler=sampler)
        return attrs.evolve(facts, architecture=f"{source.path}, rank {self._rank}, {sampler}")

    def memory(self, *, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryReport:
        """Return a report made of the arguments."""
        return MemoryReport(total_bytes=1000, free_bytes=900, activation_bytes=max_num_batched_tokens + max_num_seqs)

    def prepare(self, bucket: Bucket) -> None:
        """Refuse one bucket."""
        if bucket.batch_size == POISON:
            raise BackendError("this bucket cannot be prepared.")

    def submit(self, batch: Batch) -> PendingStep:
        """Run the batch at once, unless it is poisoned."""
        poisons = {int(start.token_ids[0]) for start in batch.row_starts}
        if POISON in poisons:
            raise RuntimeError("poison in submit")
        if POISON + 1 in poisons:
            return _PoisonedStep()
        step = super().submit(batch)
        self.run_queued()
        return step

    def swap_blocks(self, *, outs: BlockCopies, ins: BlockCopies) -> None:
        """Refuse one host block."""
        if POISON in outs.targets:
            raise BackendError("poison in swap_blocks")
        super().swap_blocks(outs=outs, ins=ins)

    def embed(self, token_ids: Any) -> Float32Array:
        """Return the number of tokens and their sum."""
        return np.array([[len(tokens), tokens.sum()] for tokens in token_ids], np.float32)

    def close(self) -> None:
        """Write a line to the model's path if it asks for that."""
        if self._mark.name == CLOSED:
            with self._mark.open("a") as file:
                file.write("closed\n")


class _PoisonedStep:
    def wait(self) -> StepOutput:
        raise RuntimeError("poison in wait")


class TellingSampler(Sampler):
    """Has a name, and samples nothing: a fake backend does that itself."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __str__(self) -> str:
        return f"sampler {self._rank}"

    def allocate(self, **_: Any) -> None:
        """Keep nothing."""

    def start_row(self, start: RowStart) -> None:
        """Keep nothing."""

    def sample(self, logits: Any, context: Any) -> Any:
        """Never called."""
        raise RuntimeError("a fake backend samples by itself")


class Gate:
    """Blocks its callers, one of each rank, until it is opened once; a named pipe, so that it works between processes.

    Args:
        folder: An empty one.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "gate"
        self._writer = -1
        os.mkfifo(self._path)

    def pass_through(self) -> None:
        """Block until the gate is opened."""
        with self._path.open("rb", buffering=0) as file:
            file.read(1)

    def open(self) -> None:
        """Let those who wait now, or come later, pass; returns at once."""
        self._writer = os.open(self._path, os.O_RDWR)
        os.write(self._writer, b"x" * _MOST_RANKS)

    def close(self) -> None:
        """Give the pipe up."""
        os.close(self._writer)


class BlockedBackends:
    """Makes backends whose ``submit`` waits at a gate; can be pickled."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __call__(self, rank: int) -> FakeBackend:
        """Make one."""
        return _BlockedBackend(self._gate)


class _BlockedBackend(FakeBackend):
    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self._gate = gate

    def submit(self, batch: Batch) -> PendingStep:
        self._gate.pass_through()
        return super().submit(batch)


class QuietWorker(KVWorkerSide):
    """The worker side of a connector with nothing to do."""

    def register(self, kv_cache: Any) -> None:
        """Ignore it."""

    def begin_step(self, message: bytes) -> None:
        """Do nothing."""

    def end_step(self) -> None:
        """Do nothing."""

    def poll(self) -> ConnectorReport:
        """Report nothing."""
        return ConnectorReport()

    def close(self) -> None:
        """Do nothing."""


class FramingWorker(QuietWorker):
    """Reports, in place of transfer ids: length of the message, first cached token when the step began, and when it ended."""

    def __init__(self) -> None:
        self._tokens: Any = (-2,)
        self._seen: list[int] = []

    def register(self, kv_cache: Any) -> None:
        """Take the fake cache's tokens."""
        self._tokens = kv_cache[1]

    def begin_step(self, message: bytes) -> None:
        """Look."""
        self._seen = [len(message), int(self._tokens[0])]

    def end_step(self) -> None:
        """Look again."""
        self._seen.append(int(self._tokens[0]))

    def poll(self) -> ConnectorReport:
        """Return what was seen since the last report."""
        seen, self._seen = self._seen, []
        return ConnectorReport(loaded=tuple(seen))


class JoiningWorker(QuietWorker, SupportsRemoteScheduler):
    """Reports, in place of transfer ids: its rank, how many layouts it was told, and how often; and whom it was told of, as messages."""

    def __init__(self) -> None:
        self._told: list[tuple[int, list[str]]] = []

    def on_ranks(self, layouts: Sequence[KVLayout], *, rank: int) -> None:
        """Remember."""
        self._told.append((rank, [layout.numerics for layout in layouts]))

    def poll(self) -> ConnectorReport:
        """Return what is remembered."""
        return ConnectorReport(
            loaded=tuple([number for rank, names in self._told for number in (rank, len(names))]),
            messages=tuple([name.encode() for _, names in self._told for name in names]),
        )


class ExpectingWorker(QuietWorker):
    """Reports, in place of transfer ids: how often it was told to expect layers before the step began."""

    def __init__(self) -> None:
        self._num_told = self._num_before = 0

    def expect_layers(self) -> None:
        """Count."""
        self._num_told += 1

    def begin_step(self, message: bytes) -> None:
        """Begin to count anew."""
        self._num_before, self._num_told = self._num_told, 0

    def poll(self) -> ConnectorReport:
        """Return the count."""
        return ConnectorReport(loaded=(self._num_before,))


class RaisingWorker(QuietWorker):
    """A worker side whose store is gone."""

    def begin_step(self, message: bytes) -> None:
        """Raise."""
        raise OSError("the store is gone")

    def end_step(self) -> None:
        """Raise."""
        raise OSError("the store is gone")

    def poll(self) -> ConnectorReport:
        """Raise."""
        raise OSError("the store is gone")

    def close(self) -> None:
        """Raise."""
        raise OSError("the store is gone")
