"""Ranks as threads of this process: collectives over shared tensors, and the same calls on every rank's backend."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import attrs
import numpy as np
import torch

from support.devices import DEVICE
from trencadis.errors import CollectiveError
from trencadis.interfaces import (
    AllocationPlan,
    Backend,
    BackendCapabilities,
    BlockCopies,
    Collective,
    PendingStep,
    RankGroups,
    Sampled,
    Sampler,
    SamplingContext,
    SupportsRanks,
)
from trencadis.records import (
    Batch,
    Bucket,
    Float32Array,
    Int32Array,
    MemoryReport,
    ModelFacts,
    ModelSource,
    ParallelLayout,
    RowStart,
    StepOutput,
    WarmUpReport,
)

TIMEOUT_S = 120.0


class _Meeting:
    """What the ranks of a group have in common."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self.tensors: list[torch.Tensor | None] = [None] * size
        self.names: list[Any] = [None] * size
        self.messages = {(a, b): queue.Queue() for a in range(size) for b in range(size)}


class ThreadCollective(Collective):
    """Sums in rank order, the same on every rank; a call that another rank does not make in kind and shape raises."""

    def __init__(self, meeting: _Meeting, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.num_calls: dict[str, int] = {}
        self.was_aborted = False
        self._meeting = meeting

    def _meet(self, name: str, tensor: torch.Tensor | None, use: Callable[[list[Any]], Any]) -> Any:
        self.num_calls[name] = self.num_calls.get(name, 0) + 1
        meeting = self._meeting
        try:
            meeting.tensors[self.rank] = tensor
            meeting.names[self.rank] = (name, None if tensor is None else (tensor.shape, tensor.dtype))
            meeting.barrier.wait()
            if len(set(map(str, meeting.names))) > 1:
                self.abort()
                raise CollectiveError(f"ranks call different things: {meeting.names}")
            found = use(meeting.tensors)
            meeting.barrier.wait()
            return found
        except threading.BrokenBarrierError as error:
            raise CollectiveError("another rank ended") from error

    def all_reduce(self, tensor: torch.Tensor) -> None:
        assert tensor.is_contiguous(), "the contract asks for contiguous tensors"
        wide = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype

        def add(tensors: list[Any]) -> torch.Tensor:
            total = tensors[0].to(wide, copy=True)
            for one in tensors[1:]:
                total += one.to(wide)
            return total

        total = self._meet("all_reduce", tensor, add)
        tensor.copy_(total)
        self._meet("all_reduce done", None, lambda _: None)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._meet("all_gather", tensor, lambda tensors: torch.cat(tensors, -1))

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> None:
        assert tensor.is_contiguous(), "the contract asks for contiguous tensors"
        found = self._meet("broadcast", tensor, lambda tensors: tensors[source].clone())
        tensor.copy_(found)

    def send(self, tensor: torch.Tensor, *, target: int) -> None:
        self._meeting.messages[self.rank, target].put(tensor.clone())

    def receive(self, tensor: torch.Tensor, *, source: int) -> None:
        messages = self._meeting.messages[source, self.rank]
        found = messages.get(timeout=TIMEOUT_S)
        if found is None:
            messages.put(None)
            raise CollectiveError("another rank ended")
        tensor.copy_(found)

    def barrier(self) -> None:
        self._meet("barrier", None, lambda _: None)

    def abort(self) -> None:
        self.was_aborted = True
        self._meeting.barrier.abort()
        for messages in self._meeting.messages.values():
            messages.put(None)

    def close(self) -> None:
        self.abort()


def make_groups(tensor: int, *, pipeline: int = 1, expert: int = 1, attention: str = "tensor") -> list[RankGroups]:
    """Return the place of each rank of a replica; groups of one stage and of all are apart."""
    layout = ParallelLayout(tensor=tensor, pipeline=pipeline, expert=expert, attention=attention)
    stages = [_Meeting(tensor) for _ in range(pipeline)]
    world = _Meeting(layout.num_ranks)
    return [
        RankGroups(
            layout=layout,
            rank=rank,
            tensor=ThreadCollective(stages[layout.stage(rank)], layout.tensor_rank(rank), tensor),
            world=ThreadCollective(world, rank, layout.num_ranks),
        )
        for rank in range(layout.num_ranks)
    ]


class Ranks:
    """Calls every rank at once, each in a thread of its own, and waits for all."""

    def __init__(self, make: Callable[[RankGroups], Any], size: int, *, pipeline: int = 1, **layout: Any) -> None:
        self.groups = make_groups(size, pipeline=pipeline, **layout)
        self._threads = [ThreadPoolExecutor(1) for _ in self.groups]
        self.all = self._on_each(lambda rank: make(self.groups[rank]))

    def call(self, use: Callable[[Any], Any]) -> list[Any]:
        """Return what ``use`` returns for each rank; the first rank's error is raised when all are done."""
        return self._on_each(lambda rank: use(self.all[rank]))

    def errors(self, use: Callable[[Any], Any]) -> list[BaseException | None]:
        """Return the error of each rank."""
        return [one.exception() for one in self._submit(lambda rank: use(self.all[rank]))]

    def close(self) -> None:
        """End the threads."""
        for group in self.groups:
            group.tensor.abort()
            group.world.abort()
        for one in self._threads:
            one.shutdown()

    def _submit(self, use: Callable[[int], Any]) -> list[Any]:
        futures = [one.submit(use, rank) for rank, one in enumerate(self._threads)]
        for one in futures:
            one.exception()
        return futures

    def _on_each(self, use: Callable[[int], Any]) -> list[Any]:
        futures = self._submit(use)
        errors = [one.exception() for one in futures if one.exception() is not None]
        if errors:
            # A rank that waited for another says less than that one.
            raise next((one for one in errors if not isinstance(one, CollectiveError)), errors[0])
        return [one.result() for one in futures]


class RankedBackend(Backend):
    """Backends of all ranks as one: every call goes to each, and the output is that of the rank that samples."""

    def __init__(self, make: Callable[[], Backend], size: int, *, pipeline: int = 1, **layout: Any) -> None:
        def join(groups: RankGroups) -> Backend:
            backend = make()
            full = cast("SupportsRanks", backend)
            full.join(groups)
            return backend

        self.ranks = Ranks(join, size, pipeline=pipeline, **layout)
        self._output = self.ranks.groups[0].layout.output_rank
        self._is_pipeline = pipeline > 1

    @property
    def capabilities(self) -> BackendCapabilities:
        # The suite's layer-wise tests want the cache of one rank to be all there is.
        return attrs.evolve(self.ranks.all[0].capabilities, layerwise_kv=False)

    def load(self, source: ModelSource, *, sampler: Sampler) -> ModelFacts:
        facts = self.ranks.call(
            lambda rank: rank.load(source, sampler=sampler if rank is self.ranks.all[self._output] else Forbidden())
        )
        assert len({one.identity for one in facts}) == 1, "ranks have models of different identity"
        assert len({(one.num_parameters, one.vocab_size, one.embedding_size) for one in facts}) == 1
        return facts[self._output]

    def memory(self, *, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryReport:
        tokens, seqs = max_num_batched_tokens, max_num_seqs
        return self.ranks.call(lambda rank: rank.memory(max_num_batched_tokens=tokens, max_num_seqs=seqs))[0]

    def allocate(self, plan: AllocationPlan) -> None:
        self.ranks.call(lambda rank: rank.allocate(plan))

    def prepare(self, bucket: Bucket) -> None:
        self.ranks.call(lambda rank: rank.prepare(bucket))

    def warm_up(self, buckets: Sequence[Bucket], *, progress: Any = None) -> WarmUpReport:
        first = self.ranks.all[0]
        return self.ranks.call(lambda rank: rank.warm_up(buckets, progress=progress if rank is first else None))[0]

    def submit(self, batch: Batch) -> PendingStep:
        if self._is_pipeline:
            batch = attrs.evolve(batch, start_token_ids=self._start_tokens(batch))
        return _RankedStep(self.ranks.call(lambda rank: rank.submit(batch)), self._output)

    def _start_tokens(self, batch: Batch) -> Int32Array:
        """Return what an engine would bring for stages that do not sample; the driver of the suite takes this for one backend."""
        starting = {start.row: start.token_ids for start in batch.row_starts}
        held = self.ranks.all[self._output]._rows.tokens
        tokens: Int32Array = np.zeros(batch.num_sequences, np.int32)
        for one in batch.passes:
            for index, row, start in zip(one.indices.tolist(), one.rows.tolist(), one.starts.tolist(), strict=True):
                tokens[index] = starting.get(row, held[row])[start]
        return tokens

    def embed(self, token_ids: Sequence[Int32Array]) -> Float32Array:
        found = self.ranks.call(lambda rank: rank.embed(token_ids))
        return found[self._output]

    def copy_blocks(self, *, sources: Int32Array, targets: Int32Array) -> None:
        self.ranks.call(lambda rank: rank.copy_blocks(sources=sources, targets=targets))

    def swap_blocks(self, *, outs: BlockCopies, ins: BlockCopies) -> None:
        self.ranks.call(lambda rank: rank.swap_blocks(outs=outs, ins=ins))

    def close(self) -> None:
        for rank in self.ranks.all:
            rank.close()


class _RankedStep:
    def __init__(self, steps: list[PendingStep], output: int) -> None:
        self._steps = steps
        self._output = output

    def wait(self) -> StepOutput:
        outputs = [step.wait() for step in self._steps]
        first = outputs.pop(self._output)
        for one in outputs:
            assert not len(one.token_ids)
            assert not one.num_emitted.any()
            assert not one.logprobs
            assert not one.prompt_logprobs
            assert len(one.num_emitted) == len(first.num_emitted)
        return first


class Forbidden(Sampler):
    """Of a rank that does not sample: every call is an error."""

    honours = frozenset({"greedy"})

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        raise AssertionError("a rank that does not sample calls its sampler")

    def start_row(self, start: RowStart) -> None:
        raise AssertionError("a rank that does not sample calls its sampler")

    def sample(self, logits: torch.Tensor, context: SamplingContext) -> Sampled:
        raise AssertionError("a rank that does not sample calls its sampler")


def ranked_backend(size: int, *, expert: int = 1, attention: str = "tensor", **options: Any) -> RankedBackend:
    """Return a backend ``torch`` of several ranks, for engines that name it by this path."""
    from trencadis.clock import SystemClock
    from trencadis_torch.backend import TorchBackend
    from trencadis_torch.config import TorchConfig

    return RankedBackend(
        lambda: TorchBackend(TorchConfig(device=DEVICE, **options), clock=SystemClock()),
        size,
        expert=expert,
        attention=attention,
    )
