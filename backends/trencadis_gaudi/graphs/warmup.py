"""Warm-up: compiles everything before the first request that would otherwise be compiled while a request waits.

    estimate ─▶ sampler ─▶ defragmenter ─▶ prefills ─▶ decodes ─▶ hot replay   ┄▶ deferred buckets, while there is nothing to serve

Orders, skips and log lines are the vendor plugin's. Buckets are compiled without running if the bridge supports that; sampler and
block swaps always run, since the host reads their results.

Deferred work is done when idle or in a share of each step's time. A piece of work cannot be interrupted, so the share is saved up until
it covers one::

    steps   │▪│▪│▪│▪│▪│▪│▪│▪│      each saves step_s
    work            ▪▪▪▪     ▪▪▪▪  as long as the saved time

Source: vllm-gaudi, v1/worker/hpu_model_runner.py, warmup_model.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from trencadis.clock import Clock
from trencadis.errors import BackendError, OutOfMemoryError
from trencadis.records import Bucket, Phase, UnifiedBucket, WarmUpReport
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.graphs.capture import Capture, log_bucket
from trencadis_gaudi.graphs.counts import Watch
from trencadis_gaudi.graphs.dynamo import DynamoCounts, in_one_line, most_compiled
from trencadis_gaudi.graphs.model import dynamo_limits
from trencadis_gaudi.habana import Habana
from trencadis_gaudi.memory import format_bytes
from trencadis_gaudi.parallel.agreement import ONE_RANK, Agreement

__all__ = ["Steps", "WarmUp", "compile_only", "every_graph", "representatives", "required_first", "Pace"]

logger = logging.getLogger("trencadis.gaudi")

_NAMES = {Phase.PREFILL: "Prompt", Phase.DECODE: "Decode"}


class Steps(Protocol):
    """The steps of a warm-up, which a backend implements."""

    @property
    def num_text_sizes(self) -> int:
        """Number of sizes in which texts are embedded, prepared or not."""
        ...

    def run_bucket(self, bucket: Bucket, graph: bool) -> None:
        """Run a bucket on padding."""
        ...

    def warm_sampler(self, buckets: Sequence[Bucket]) -> None:
        """Sample in every size and path that passes in these buckets use."""
        ...

    def warm_swaps(self) -> None:
        """Swap blocks in every size, if the engine swaps blocks."""
        ...

    def warm_embedder(self) -> None:
        """Embed texts of every size, if embeddings are configured."""
        ...


class WarmUp:
    """One warm-up.

    Args:
        config: Table ``[backend.gaudi]``.
        habana: Device to warm up.
        capture: Captures graphs.
        watch: Records prepared buckets.
        clock: Clock for durations.
        steps: Steps of the warm-up.
        agreement: Decisions of all ranks, which have separate clocks and prepare the same bucket at the same time.

    Attributes:
        pace: Pace of deferred work, to be notified of steps.
    """

    def __init__(
        self,
        config: GaudiConfig,
        habana: Habana,
        *,
        capture: Capture,
        watch: Watch,
        clock: Clock,
        steps: Steps,
        agreement: Agreement = ONE_RANK,
    ) -> None:
        self._config = config
        self._habana = habana
        self._capture = capture
        self._watch = watch
        self._clock = clock
        self._steps = steps
        self._agreement = agreement
        self._prepared: list[Bucket] = []
        self._rest: deque[Bucket] = deque()
        self._check: Callable[[], None] = _nothing
        self.pace = Pace(
            clock, quiet_s=config.warmup_quiet_s, step_s=config.warmup_step_s, expected_s=config.expected_graph_s
        )

    def run(self, buckets: Sequence[Bucket], *, progress: Callable[[int, int], None] | None = None) -> WarmUpReport:
        """Warm up, as ``Backend.warm_up``.

        Raises:
            OutOfMemoryError: Graphs do not fit, and ``on_memory_shortage`` is ``fail``.
        """
        start_s, free = self._clock.now_s(), self._habana.free_bytes()
        with self._watch.compilations(warns=False) as compiled:
            if self._config.mode == "eager":
                # Each operation is compiled when it is first run, so buckets have nothing to prepare.
                self._all_done(buckets, progress)
            else:
                self._announce(buckets)
                self._prepare(buckets, progress)
        allocated = free - self._habana.free_bytes()
        took_s = self._clock.now_s() - start_s
        logger.info("Warmup finished in %.0f secs, allocated %s of device memory", took_s, format_bytes(allocated))
        self._watch.graphs(len(self._capture.graphs), self._capture.graph_bytes)
        self._watch.warm_up(took_s, num_prepared=len(self._prepared), num_deferred=len(self._rest))
        return WarmUpReport(
            prepared=tuple(self._prepared),
            num_graphs=len(self._capture.graphs),
            graph_bytes=self._capture.graph_bytes,
            num_compilations=compiled.number,
            num_deferred=len(self._rest),
        )

    def rest(self, *, is_idle: bool) -> tuple[Bucket, ...]:
        """Prepare one deferred bucket if the pace allows it, and return it.

        Args:
            is_idle: Whether no request is being served.
        """
        if not self._rest or not self._agreement.all_hold(self.pace.allows(is_idle=is_idle)):
            return ()
        bucket, start_s = self._rest.popleft(), self._clock.now_s()
        with self._watch.compilations(warns=False):
            self._prepare_late(bucket)
        took_s = self._clock.now_s() - start_s
        self.pace.took(took_s, is_idle=is_idle)
        self._prepared.append(bucket)
        self._watch.warmed_up(bucket)
        self._watch.graphs(len(self._capture.graphs), self._capture.graph_bytes)
        self._watch.warm_up(took_s, num_prepared=len(self._prepared), num_deferred=len(self._rest))
        num_all = len(self._prepared) + len(self._rest)
        log_bucket(_NAMES[bucket.phase], bucket, len(self._prepared), num_all, self._habana.free_bytes())
        return (bucket,)

    def _prepare_late(self, bucket: Bucket) -> None:
        if not self._capture.as_graph(bucket):
            self._steps.run_bucket(bucket, False)
            return
        try:
            self._capture.within_margin(bucket)
        except OutOfMemoryError as error:
            # A serving engine continues, since its larger graphs exist already.
            logger.warning("%s It runs without a graph.", error)
            self._steps.run_bucket(bucket, False)

    def _announce(self, buckets: Sequence[Bucket]) -> None:
        each_s = self._config.expected_graph_s
        logger.info(
            "Warm-up of %d buckets: about %.0f s, at %g s each (backend.gaudi.expected_graph_s).",
            len(buckets),
            len(buckets) * each_s,
            each_s,
        )
        if self._config.mode == "compile":
            _set_dynamo_limits(len(buckets) + self._steps.num_text_sizes, regional=self._config.regional)

    def _prepare(self, buckets: Sequence[Bucket], progress: Callable[[int, int], None] | None) -> None:
        with every_graph() if self._config.mode == "compile" else contextlib.nullcontext(_nothing) as self._check:
            self._prepare_all(buckets, progress)

    def _prepare_all(self, buckets: Sequence[Bucket], progress: Callable[[int, int], None] | None) -> None:
        self._steps.warm_sampler(buckets)
        self._steps.warm_swaps()
        required = self._split(buckets)
        phases = {
            phase: sorted((bucket for bucket in required if bucket.phase is phase), reverse=True) for phase in Phase
        }
        only = self._config.compile_only
        with compile_only(self._habana) if only else contextlib.nullcontext():
            self._steps.warm_embedder()
            self._compile(phases, progress)
        if self._config.capture == "budgeted":
            self._capture.budgeted(phases[Phase.PREFILL], phases[Phase.DECODE])
        if self._config.hot_replay:
            for of_phase in phases.values():
                for bucket in representatives(of_phase):
                    self._steps.run_bucket(bucket, self._capture.as_graph(bucket))

    def _split(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        """Return the buckets to prepare now, and keep the rest for later."""
        count = self._config.warmup_required
        order, num_covering = required_first(buckets)
        count = max(count, num_covering) if count else len(order)
        self._rest.extend(order[count:])
        if self._rest:
            logger.info("%d buckets are prepared now, %d while there is nothing to serve.", count, len(self._rest))
        return order[:count]

    def _compile(self, phases: dict[Phase, list[Bucket]], progress: Callable[[int, int], None] | None) -> None:
        total = sum(map(len, phases.values()))
        places = {bucket: place for of_phase in phases.values() for place, bucket in enumerate(of_phase, start=1)}

        def done(bucket: Bucket) -> None:
            self._check()  # other buckets would break at the same place, after a long time
            of = len(phases[bucket.phase])
            log_bucket(_NAMES[bucket.phase], bucket, places[bucket], of, self._habana.free_bytes())
            self._note(bucket, total, progress)

        if self._config.captures and self._config.capture == "capture_all":
            self._capture.every(list(places), done=done)
            for phase, name in _NAMES.items():
                of_phase = [num_bytes for bucket, num_bytes in self._capture.graphs.items() if bucket.phase is phase]
                logger.info("Graph/%s captured:%d used_mem:%s", name, len(of_phase), format_bytes(sum(of_phase)))
            return
        for bucket in places:
            self._steps.run_bucket(bucket, False)
            done(bucket)

    def _note(self, bucket: Bucket, total: int, progress: Callable[[int, int], None] | None) -> None:
        if bucket in self._prepared:
            return  # captured again after a shortage of memory
        self._prepared.append(bucket)
        self._watch.warmed_up(bucket)
        if progress is not None:
            progress(len(self._prepared), total)

    def _all_done(self, buckets: Sequence[Bucket], progress: Callable[[int, int], None] | None) -> None:
        for bucket in buckets:
            self._note(bucket, len(buckets), progress)


@contextlib.contextmanager
def compile_only(habana: Habana) -> Iterator[None]:
    """Compile without running within a ``with`` block, if the bridge supports that."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(habana.internal.bridge_config.env_setting("PT_COMPILE_ONLY_MODE", True))
        except KeyError:
            logger.warning(
                "Cannot use PT_COMPILE_ONLY_MODE. Warmup time will be negatively impacted. "
                "Please update Gaudi Software Suite."
            )
        yield


@contextlib.contextmanager
def every_graph() -> Iterator[Callable[[], None]]:
    """Raise if torch.compile gives up on a piece of code, which would then run one operation at a time.

    Yields a function that raises if a graph is broken; it is also called at the end.

    Raises:
        BackendError: torch.compile gave up, broke a graph, or failed.
    """
    import torch._dynamo.config as dynamo
    from torch._dynamo import exc

    counts = DynamoCounts()

    def check() -> None:
        if (found := counts.breaks()) and counts.num_graph_breaks:
            first, number = next(iter(found)), len(found)
            more = f" (and {number - 1} more)" if number > 1 else ""
            raise BackendError(
                f"torch.compile broke a graph during the warm-up: {first}{more}.",
                hint="What breaks it would run one operation at a time, with a value read from the device in between. Keep it out of "
                'the model\'s forward, or set backend.gaudi.mode to "lazy" (HPU graphs) or "eager".',
            )

    # PyTorch 2.6 names exception and setting after a cache; later versions renamed the exception only.
    gave_up = getattr(exc, "FailOnRecompileLimitHit", None) or exc.FailOnCacheLimitHit  # type: ignore[attr-defined]
    with dynamo.patch(fail_on_cache_limit_hit=True):
        try:
            yield check
        except gave_up as error:
            raise BackendError(
                f"torch.compile gave up during the warm-up: {str(error).splitlines()[0]}",
                hint="Something of the model differs from call to call; TORCH_LOGS=recompiles names it. "
                'backend.gaudi.mode = "eager" runs without torch.compile.',
            ) from error
        except exc.TorchDynamoException as error:
            raise BackendError(
                f"torch.compile failed during the warm-up: {type(error).__name__}: {in_one_line(str(error))}",
                hint='backend.gaudi.mode = "eager" runs without torch.compile, and shows whether the model itself fails.',
            ) from error
        check()


def _nothing() -> None:
    pass


def _set_dynamo_limits(num_buckets: int, *, regional: bool) -> None:
    import torch._dynamo.config as dynamo

    limit, total = dynamo_limits(num_buckets, regional=regional)
    # Another engine of this process may have compiled the same code, and torch.compile never resets its count.
    before = most_compiled()
    dynamo.cache_size_limit = max(limit + before, dynamo.cache_size_limit)
    dynamo.accumulated_cache_size_limit = max(total + before, dynamo.accumulated_cache_size_limit)


def representatives(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return the smallest, the median and the largest bucket, without duplicates. Pure."""
    order = sorted(buckets, key=lambda bucket: (bucket.num_tokens, bucket.num_blocks, bucket))
    return [order[index] for index in sorted({0, len(order) // 2, len(order) - 1})] if order else []


def required_first(buckets: Sequence[Bucket]) -> tuple[list[Bucket], int]:
    """Return buckets that cover all others first, then the rest from the largest; and the number of the first ones. Pure."""
    order = sorted(buckets, key=lambda bucket: (_size(bucket), bucket), reverse=True)
    front: list[Bucket] = []
    for bucket in order:
        if not any(_covers(larger, bucket) for larger in front):
            front.append(bucket)
    covering = set(front)
    return [*front, *(bucket for bucket in order if bucket not in covering)], len(front)


def _covers(larger: Bucket, smaller: Bucket) -> bool:
    """Return whether a larger bucket covers a smaller one; in descending order no bucket is covered by a later one."""
    if isinstance(smaller, UnifiedBucket) and isinstance(larger, UnifiedBucket):
        fits = larger.num_unique_blocks >= smaller.num_unique_blocks and larger.is_causal >= smaller.is_causal
    else:
        fits = larger.phase is smaller.phase
    sizes = ((larger.batch_size, smaller.batch_size), (larger.query_len, smaller.query_len))
    return fits and all(one >= other for one, other in (*sizes, (larger.num_blocks, smaller.num_blocks)))


def _size(bucket: Bucket) -> int:
    unique = bucket.num_unique_blocks if isinstance(bucket, UnifiedBucket) else 0
    return bucket.num_tokens + bucket.num_blocks + unique


class Pace:
    """Decides when deferred work may run, from the times of steps and of pieces of work. Not thread-safe.

    Args:
        clock: Clock of the steps.
        quiet_s: Time without a step after which the backend is idle, seconds.
        step_s: Time that each step adds for deferred work, seconds; 0: work only when idle.
        expected_s: Expected duration of the first piece of work, seconds.
    """

    def __init__(self, clock: Clock, *, quiet_s: float, step_s: float, expected_s: float) -> None:
        self._clock = clock
        self._quiet_s = quiet_s
        self._step_s = step_s
        self._expected_s = expected_s
        self._saved_s = 0.0
        self._last_step_s: float | None = None

    def stepped(self) -> None:
        """Record that a step was submitted."""
        self._last_step_s = self._clock.now_s()
        # Bounded, so that time saved without work is not spent at once.
        self._saved_s = min(self._saved_s + self._step_s, self._expected_s + self._step_s)

    def allows(self, *, is_idle: bool) -> bool:
        """Return whether a piece of work may run now. Pure.

        Args:
            is_idle: Whether no request is being served.
        """
        if not is_idle:
            return self._step_s > 0 and self._saved_s >= self._expected_s
        return self._last_step_s is None or self._clock.now_s() - self._last_step_s >= self._quiet_s

    def took(self, seconds: float, *, is_idle: bool) -> None:
        """Record the duration of a piece of work, seconds, as the expected duration of the next one."""
        self._expected_s = seconds
        if not is_idle:
            self._saved_s = max(0.0, self._saved_s - seconds)
