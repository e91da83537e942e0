"""Ranks in processes of their own: each computes a share of the model, or, where there is one, all of it.

    engine   submit(n) ── one encoding, sent to every rank ──▶ ranks   batch n ▶ forward, sums over ranks ▶ sample on the output rank
             wait(n) ◀──────── an output of each rank ─────────         batch n + 1 ...

The ranks are one unit: where one ends, stops or disagrees with the others, all are killed, steps in flight raise ``RanksLostError``, and
:meth:`RanksExecutor.restart` starts them again.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import pickle
import select
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import attrs

from trencadis.clock import Clock, SystemClock
from trencadis.errors import (
    BackendError,
    CapabilityError,
    ConfigValueError,
    RanksLostError,
    SamplingFailedError,
    StepFailedError,
)
from trencadis.interfaces import (
    AllocationPlan,
    Backend,
    BackendCapabilities,
    BlockCopies,
    Executor,
    PendingStep,
    Sampler,
)
from trencadis.link import LinkClosedError
from trencadis.processes import RestartLimit
from trencadis.records import (
    Batch,
    Bucket,
    Float32Array,
    Int32Array,
    KVLayout,
    MemoryReport,
    ModelFacts,
    ModelSource,
    ParallelLayout,
    StepOutput,
    WarmUpReport,
)
from trencadis_plugins.executor.config import RanksConfig
from trencadis_plugins.executor.ranks.groups import Groups
from trencadis_plugins.executor.ranks.link import Kind, receive_messages, send_message
from trencadis_plugins.executor.ranks.rank import Rank, StartRank
from trencadis_plugins.executor.ranks.wire import decode_output, encode_batch

__all__ = ["RanksExecutor"]

logger = logging.getLogger("trencadis.executor")

_LOOK_S: Final = 0.5
"""How often ranks that are waited for are looked after."""
_STOPPED_S: Final = 2.0
"""A rank that is stopped is lost when what it was asked is as old."""
_SLOW_STEPS: Final = 20.0
"""A step may take this many times as long as the slowest before it."""
_AGREE_S: Final = 5.0
"""After one rank said that a step failed, the others have so long to say the same; else they wait for it in a sum."""
_CLOSE_S: Final = 10.0
_PATIENCE_S: Final = 900.0
"""A rank waits for another so long: one may load or compile while others are done. Ranks that are stuck the executor finds earlier."""
_FATAL: Final = frozenset({"make", "load", "memory", "allocate", "connect", "prepare", "warm_up"})
"""Calls without which nothing goes on: where one rank fails, the others need not be waited for."""


class RanksExecutor(Executor):
    """Hosts every rank of a replica in a process of its own; a subclass says where.

    Args:
        config: When ranks are lost, and how often they are started again.
        layout: How many ranks, and which of them gives the output.
        name: Name of the executor, for messages.
        clock: Measures silence.
    """

    def __init__(
        self,
        config: RanksConfig,
        *,
        layout: ParallelLayout,
        name: str,
        clock: Clock | None = None,
    ) -> None:
        self._name = name
        self._config = config
        self._layout = layout
        self._clock = clock or SystemClock()
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._ranks: list[Rank] = []
        self._groups: Groups | None = None
        self._generation = 0
        self._host = ""  # by which ranks on other machines reach this one
        self._pending: dict[int, _Answers] = {}
        self._connected: dict[int, Rank] = {}
        self._poll = select.poll()
        self._rest: _Answers | None = None
        self._slowest_s = self._looked_s = 0.0
        self._lost = ""
        self._restarts = RestartLimit(
            max_restarts=config.max_restarts, window_s=config.restart_window_s, now_s=self._clock.now_s
        )
        self._is_closing = self._is_closed = False
        self._capabilities: BackendCapabilities | None = None
        self._swaps = False
        self._ready: list[set[Bucket]] = []
        self._again: list[Callable[[], object]] = []

    # ------------------------------------------------------------------------------------------------ starting

    def start(
        self,
        *,
        make_backend: Callable[[int], Backend],
        make_sampler: Callable[[int], Sampler],
        source: ModelSource,
    ) -> ModelFacts:
        """Start the ranks' processes, and load each one's share of the model.

        Args:
            make_backend: Travels to the ranks: a function of a module, or an object that can be pickled.
            make_sampler: The same.
            source: The model.
        """
        starts = [
            StartRank(
                rank=rank,
                make_backend=make_backend,
                make_sampler=make_sampler,
                is_output=rank == self._layout.output_rank,
            )
            for rank in range(self.num_ranks)
        ]

        def load() -> ModelFacts:
            return self._load(starts, source)

        self._again = [load]
        return load()

    def _load(self, starts: Sequence[StartRank], source: ModelSource) -> ModelFacts:
        with self._lock:
            self._check_open()
            for rank in self._start_ranks(starts[0].make_backend):
                rank.heard_s = self._clock.now_s()  # it has connected
                self._ranks.append(rank)
                self._connected[rank.link.fileno()] = rank
                self._poll.register(rank.link, select.POLLIN)
            made = self._call("make", by_rank=[{"start": one} for one in starts])
            self._ready = [set() for _ in made]
            self._capabilities, self._swaps = made[self._layout.output_rank]
            groups = self._groups = self._new_groups(self._capabilities)
            addresses = [None if groups is None else groups.addresses(one.rank) for one in starts]
            facts: list[ModelFacts] = self._call(
                "load", by_rank=[{"source": source, "addresses": one} for one in addresses]
            )
            if groups is not None:
                groups.opened()
        return attrs.evolve(
            facts[self._layout.output_rank],
            kv_bytes_per_token=max(one.kv_bytes_per_token for one in facts),
            weights_bytes=max(one.weights_bytes for one in facts),
        )

    def _new_groups(self, capabilities: BackendCapabilities) -> Groups | None:
        """Return what connects the ranks; None for one rank.

        Raises:
            CapabilityError: The backend computes alone.
            ConfigValueError: It does not compute with the configured collectives.
        """
        if self.num_ranks == 1:
            return None
        known = capabilities.collectives
        if self._host:
            known = tuple(name for name in known if name != "shared_memory")
        if not known:
            raise CapabilityError(
                f"[parallel] tensor = {self._layout.tensor}, pipeline = {self._layout.pipeline}: the backend does not compute a share of "
                "a model (its capabilities name no collectives for these machines).",
                hint="Leave both at 1, or choose another backend.",
            )
        kind = self._config.collective
        if kind == "auto":
            kind = known[0]
        elif kind not in known:
            raise ConfigValueError(
                f'[executor.{self._name}] collective = "{kind}": the backend computes with {", ".join(known) or "none"} on these devices.',
                hint='Set it to "auto", or to one of these.',
            )
        self._generation += 1
        return Groups(kind, self._layout, generation=self._generation, timeout_s=_PATIENCE_S, host=self._host)

    @abstractmethod
    def _start_ranks(self, make_backend: Callable[[int], Backend]) -> Iterable[Rank]:
        """Start the process of every rank, in their order.

        Args:
            make_backend: That will be called there.
        """

    def restart(self) -> None:
        """Start the ranks again, and bring them to where they were before their first step; if they are lost meanwhile, once more."""
        with self._lock:
            self._check_open()
            if not self._restarts.note():
                raise BackendError(
                    f"The executor {self._name} lost its ranks {self._restarts.num_recent} times within "
                    f"{self._config.restart_window_s:.0f} s, the last time because {self._lost}.",
                    hint=f"Mend what ends them, or raise max_restarts in [executor.{self._name}].",
                )
            logger.warning("The ranks are started again: %s.", self._lost)
            self._end_ranks()
            self._lost, self._rest = "", None
            try:
                for again in self._again:
                    again()
            except RanksLostError:
                self.restart()

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the layout."""
        return self._layout.num_ranks

    @property
    def capabilities(self) -> BackendCapabilities:
        """The output rank's."""
        if self._capabilities is None:
            raise BackendError(f"The executor {self._name} was not started.")
        return self._capabilities

    # --------------------------------------------------------------------------------------------------- calls

    def memory(self, *, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryReport:
        """Return the report of the rank with the least free memory."""

        def call() -> list[MemoryReport]:
            return self._call("memory", max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)

        reports = call()
        least = min(reports, key=lambda report: report.free_bytes - report.activation_bytes)
        shares = [report.cache_bytes for report in reports if report.cache_bytes is not None]
        # Again, so that what a profile run leaves behind is there after a restart, too.
        self._again.append(call)
        return attrs.evolve(least, cache_bytes=min(shares) if shares else None)

    def allocate(self, plan: AllocationPlan) -> None:
        """Allocate on every rank, and tell the worker sides of a KV connector, which are made there, what each rank holds."""

        def call() -> None:
            self._call("allocate", plan=plan)
            if plan.connector is not None:
                layouts = self.kv_layouts()
                self._call("connect", by_rank=[{"layouts": layouts, "rank": rank} for rank in range(self.num_ranks)])

        self._again.append(call)
        call()

    def prepare(self, bucket: Bucket) -> None:
        """Prepare a bucket on every rank."""
        self._call("prepare", bucket=bucket)

    def warm_up(self, buckets: Sequence[Bucket], *, progress: Callable[[int, int], None] | None = None) -> WarmUpReport:
        """Warm up every rank; ``progress`` counts what all have done."""
        self._again.append(lambda: self._call("warm_up", buckets=buckets))
        answers = self._ask("warm_up", [{"buckets": buckets}] * self.num_ranks)
        answers.progress = progress
        reports: list[WarmUpReport] = self._results(answers)
        everywhere = set(reports[0].prepared).intersection(*(report.prepared for report in reports))
        return attrs.evolve(
            reports[self._layout.output_rank],
            prepared=tuple(bucket for bucket in reports[0].prepared if bucket in everywhere),
            num_deferred=max(report.num_deferred for report in reports),
        )

    def warm_up_rest(self, *, is_idle: bool) -> tuple[Bucket, ...]:
        """Go on with the warm-up of every rank; unless idle, what this call starts a later one returns. Nothing if they are lost."""
        with self._lock, contextlib.suppress(RanksLostError):
            ready: tuple[Bucket, ...] = ()
            if self._rest is not None:
                self._pump(0.0)
                if is_idle or self._rest.are_complete:
                    rest, self._rest = self._rest, None
                    ready = self._newly_common(self._results(rest))
            if is_idle:
                return ready or self._newly_common(self._call("warm_up_rest", is_idle=True))
            if self._rest is None:
                self._rest = self._ask("warm_up_rest", [{"is_idle": False}] * self.num_ranks)
            return ready
        return ()

    def metrics(self) -> str:
        """Return what the output rank's backend counts."""
        if not self._ranks or self._lost or self._is_closed:
            return ""
        text: str = self._call("metrics")[self._layout.output_rank]
        return text

    def embed(self, token_ids: Sequence[Int32Array]) -> Float32Array:
        """Embed texts, each rank its share."""
        vectors: Float32Array = self._call("embed", token_ids=token_ids)[self._layout.output_rank]
        return vectors

    def copy_blocks(self, *, sources: Int32Array, targets: Int32Array) -> None:
        """Copy blocks on every rank, after every batch submitted so far; if the ranks are lost, the next batch says so."""
        with contextlib.suppress(RanksLostError):
            self._call("copy_blocks", sources=sources, targets=targets)

    def swap_blocks(self, *, outs: BlockCopies, ins: BlockCopies) -> None:
        """Send copies to every rank; if they fail, so does the next batch."""
        if not self._swaps:
            raise BackendError(f"The backend of the executor {self._name} does not swap blocks.")
        self._ask("swap_blocks", [{"outs": outs, "ins": ins}] * self.num_ranks)

    def kv_layout(self) -> KVLayout:
        """Return the layout of the output rank's cache."""
        return self.kv_layouts()[self._layout.output_rank]

    def kv_layouts(self) -> list[KVLayout]:
        """Return the layout of each rank's cache."""
        return self._call("kv_layout")

    def close_connector(self) -> None:
        """Close the connector's worker side on every rank."""
        if not self._lost:
            self._call("close_connector")

    def submit(self, batch: Batch) -> PendingStep:
        """Send a batch to every rank."""
        data = encode_batch(batch)
        with self._lock:
            step = _RanksStep(self, self._new_answers(), output_rank=self._layout.output_rank)
            for rank in self._ranks:
                self._send(rank, lambda rank=rank: send_message(rank.link, Kind.BATCH, step.answers.number, data))  # type: ignore[misc]
            return step

    def close(self) -> None:
        """Let ranks finish what was submitted, and end them; may be called twice."""
        with self._lock:
            if self._is_closed:
                return
            if self._ranks and not self._lost:
                self._close_ranks()
            self._is_closed = True
            self._end_ranks()

    def _close_ranks(self) -> None:
        """Wait until every rank has closed its backend, and ended with that."""
        self._ask("close", [{}] * self.num_ranks)
        end_s = self._clock.now_s() + _CLOSE_S
        self._is_closing = True
        while self._connected and self._clock.now_s() < end_s:
            self._pump(_LOOK_S)

    # --------------------------------------------------------------------------------------------- exchanges

    def _call(self, name: str, *, by_rank: Sequence[dict[str, Any]] | None = None, **arguments: Any) -> list[Any]:
        """Call a method on every rank; returns what each returned.

        Raises:
            TrencadisError: The first that a rank raised.
            RanksLostError: One ended.
        """
        return self._results(self._ask(name, by_rank or [arguments] * self.num_ranks))

    def _ask(self, name: str, by_rank: Sequence[dict[str, Any]]) -> _Answers:
        with self._lock:
            answers = self._new_answers()
            answers.is_fatal = name in _FATAL
            for rank, arguments in zip(self._ranks, by_rank, strict=False):
                self._send(rank, lambda rank=rank, one=arguments: rank.call(answers.number, name, one))  # type: ignore[misc]
            return answers

    def _new_answers(self) -> _Answers:
        self._check_open()
        if not self._ranks and not self._lost:
            raise BackendError(f"The executor {self._name} was not started.")
        answers = _Answers(number=next(self._numbers), num_ranks=self.num_ranks, since_s=self._clock.now_s())
        if self._lost:
            answers.lost = self._lost
        else:
            self._pending[answers.number] = answers
        return answers

    def _check_open(self) -> None:
        if self._is_closed:
            raise BackendError(f"The executor {self._name} is closed.")

    def _send(self, rank: Rank, send: Callable[[], None]) -> None:
        if self._lost:
            return
        try:
            send()
        except LinkClosedError:
            self._lose(f"rank {rank.rank} {rank.describe_end()}")

    def _results(self, answers: _Answers) -> list[Any]:
        self.wait_for(answers)
        error = answers.error()
        if error is not None:
            raise error
        return [pickle.loads(payload) for _, payload in map(answers.by_rank.__getitem__, range(self.num_ranks))]

    def wait_for(self, answers: _Answers) -> None:
        """Receive until every rank has answered, or is lost."""
        with self._lock:
            while not answers.are_complete:
                self._pump(_LOOK_S)

    def _pump(self, timeout_s: float) -> None:
        """Send what waits, and receive what has come within some seconds."""
        for file, rank in self._connected.items():
            self._poll.modify(file, select.POLLIN | (select.POLLOUT if rank.link.has_unsent else 0))
        ready = self._poll.poll(timeout_s * 1000)
        for file, _ in ready:
            rank = self._connected[file]
            rank.heard_s = self._clock.now_s()
            try:
                rank.link.flush()
                for message in receive_messages(rank.link):
                    self._take(rank.rank, *message)
                    if self._lost:
                        break
            except LinkClosedError:
                self._disconnect(file)
                if not self._is_closing:
                    self._lose(f"rank {rank.rank} {rank.describe_end()}")
            if self._lost:
                return
        now_s = self._clock.now_s()
        if now_s - self._looked_s > _LOOK_S:
            self._looked_s = now_s
            self._look_after(now_s)

    def _disconnect(self, file: int) -> None:
        self._poll.unregister(file)
        del self._connected[file]

    def _take(self, rank: int, kind: Kind, number: int, payload: memoryview) -> None:
        answers = self._pending.get(number)
        if answers is None:
            return
        if kind is Kind.PROGRESS:
            answers.advance(rank, *pickle.loads(payload))
            return
        answers.by_rank[rank] = kind, payload
        if kind is Kind.ERROR and answers.failed_s is None:
            answers.failed_s = self._clock.now_s()
            if answers.is_fatal and self._groups is not None:
                self._groups.abort(f"rank {rank} failed")
        if answers.are_complete:
            del self._pending[number]
            if kind is Kind.OUTPUT:
                self._slowest_s = max(self._slowest_s, self._clock.now_s() - answers.since_s)
            # Where some went on, rows and caches are not those of the others any more; where one waited in vain, sums are out of step.
            if not answers.is_fatal and (answers.differ() or answers.broke_group()):
                answers.lost = f"a call failed on rank {answers.failing()} and not on all: {answers.error()}"
                self._lose(answers.lost)

    def _look_after(self, now_s: float) -> None:
        """Lose the ranks if one is stopped or silent."""
        if not self._pending:
            return
        oldest = min(self._pending.values(), key=lambda answers: answers.number)
        waits_s = now_s - oldest.since_s
        silent = [rank for rank in self._ranks if rank.rank not in oldest.by_rank]
        stopped = [rank for rank in silent if rank.is_stopped(now_s, is_starting=oldest.is_fatal)]
        if stopped and waits_s > _STOPPED_S:
            self._lose(f"rank {stopped[0].rank} {stopped[0].how_stopped}")
        elif oldest.failed_s is not None and now_s - oldest.failed_s > _AGREE_S:
            self._lose(f"a call failed on rank {oldest.failing()} and not on all: {oldest.error()}")
        elif oldest.is_step:
            self._judge_silence(oldest, waits_s, silent)

    def _judge_silence(self, step: _Answers, waits_s: float, silent: Sequence[Rank]) -> None:
        """Log where silent ranks are after half of the time that they have, and lose them after all of it."""
        limit_s = max(self._config.silence_s, _SLOW_STEPS * self._slowest_s)
        names = ", ".join(str(rank.rank) for rank in silent)
        if waits_s > limit_s / 2 and not step.is_dumped:
            step.is_dumped = True
            where = f" ({self._groups.where()})" if self._groups is not None else ""
            logger.warning("Rank %s has not answered for %.0f s%s; its stacks follow.", names, waits_s, where)
            for rank in silent:
                rank.dump_stacks()
        elif waits_s > limit_s:
            self._lose(f"rank {names} did not answer for {waits_s:.0f} s; its stacks are in the log")

    def _lose(self, why: str) -> None:
        """End all ranks; what they were asked for raises."""
        if self._lost:
            return
        self._lost = why
        logger.error("Lost the ranks: %s.", why)
        pending, self._pending = self._pending, {}
        for answers in pending.values():
            answers.lost = why
        self._end_ranks()

    def _end_ranks(self) -> None:
        groups, self._groups = self._groups, None
        if groups is not None:
            groups.abort("the ranks are ended")
        for file in list(self._connected):
            self._disconnect(file)
        for rank in self._ranks:
            rank.kill()
        self._ranks.clear()
        if groups is not None:
            groups.close()

    def _newly_common(self, ready: Sequence[tuple[Bucket, ...]]) -> tuple[Bucket, ...]:
        """Note what is ready on each rank; returns what is ready on all since this."""
        before = set.intersection(*self._ready)
        for known, new in zip(self._ready, ready, strict=True):
            known.update(new)
        return tuple(sorted(set.intersection(*self._ready) - before))


class _Answers:
    """What the ranks answer to one call or batch."""

    def __init__(self, *, number: int, num_ranks: int, since_s: float) -> None:
        self.number = number
        self.num_ranks = num_ranks
        self.since_s = since_s
        self.by_rank: dict[int, tuple[Kind, memoryview]] = {}
        self.lost = ""
        self.failed_s: float | None = None
        self.is_step = self.is_dumped = self.is_fatal = False
        self.progress: Callable[[int, int], None] | None = None
        self._done: dict[int, int] = {}

    @property
    def are_complete(self) -> bool:
        """Whether all have answered, or never will."""
        return bool(self.lost) or len(self.by_rank) == self.num_ranks

    def failing(self) -> int:
        """Return a rank that answered with an error; if there is one, it is not one that only waited for another."""
        errors = [rank for rank, (kind, _) in self.by_rank.items() if kind is Kind.ERROR]
        return min(self._own_errors() or errors)

    def _own_errors(self) -> list[int]:
        """Return the ranks that answered with an error that is not one of waiting for another."""
        return [rank for rank, (kind, data) in self.by_rank.items() if kind is Kind.ERROR and not pickle.loads(data)[2]]

    def differ(self) -> bool:
        """Return whether some ranks went on and others did not; stages go on where only the sampling failed."""
        errors = [pickle.loads(data)[0] for kind, data in self.by_rank.values() if kind is Kind.ERROR]
        return 0 < len(errors) < self.num_ranks and not all(isinstance(one, SamplingFailedError) for one in errors)

    def broke_group(self) -> bool:
        """Return whether a rank waited for another in vain."""
        return any(kind is Kind.ERROR and pickle.loads(data)[2] for kind, data in self.by_rank.values())

    def error(self) -> Exception | None:
        """Return the error of the failing rank, with the traceback there as its cause; None if there is none."""
        if self.lost and not (
            self.is_fatal and self._own_errors()
        ):  # else the others waited for it, and could not be woken
            return RanksLostError(f"The ranks were lost: {self.lost}.")
        if not any(kind is Kind.ERROR for kind, _ in self.by_rank.values()):
            return None
        error, cause, _ = pickle.loads(self.by_rank[self.failing()][1])
        error.__cause__ = cause
        made: Exception = error
        return made

    def advance(self, rank: int, done: int, total: int) -> None:
        """Note a rank's progress; what all have done is passed on."""
        self._done[rank] = done
        if self.progress is not None and len(self._done) == self.num_ranks and done == min(self._done.values()):
            self.progress(done, total)


class _RanksStep:
    """A batch that was sent to the ranks.

    Args:
        executor: Receives.
        answers: Answers to this batch.
        output_rank: Whose tokens count.
    """

    def __init__(self, executor: RanksExecutor, answers: _Answers, *, output_rank: int) -> None:
        self._executor = executor
        self._output_rank = output_rank
        self.answers = answers
        answers.is_step = True

    def wait(self) -> StepOutput:
        """Block until every rank is done with the step.

        Raises:
            StepFailedError: It raised on all of them; the cause is chained.
            RanksLostError: A rank ended, stopped, or went on alone.
        """
        answers = self.answers
        self._executor.wait_for(answers)
        error = answers.error()
        if error is not None:
            if isinstance(error, StepFailedError):
                raise error
            raise StepFailedError(str(error)) from error
        decoded = {rank: decode_output(payload) for rank, (_, payload) in answers.by_rank.items()}
        output = decoded[self._output_rank][0]
        num_compilations = sum(one.num_compilations for one, _ in decoded.values())
        if num_compilations != output.num_compilations:
            output = attrs.evolve(output, num_compilations=num_compilations)
        reports = {rank: report for rank, (_, report) in decoded.items() if report is not None}
        return attrs.evolve(output, connector_reports=reports) if reports else output
