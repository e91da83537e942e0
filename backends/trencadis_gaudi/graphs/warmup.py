"""The warm-up: compiles before the first request everything that would otherwise be compiled while a request waits.

    estimate ─▶ sampler ─▶ defragmenter ─▶ prefills ─▶ decodes ─▶ hot replay   ┄▶ deferred buckets, while there is nothing to serve

Orders, skips and log lines are the vendor plugin's. Buckets are compiled without being run where the bridge can do that; sampler and
block swaps always run, as the host reads their results.

Deferred work is done in idle moments or in a share of each step's time. A piece of it cannot be interrupted, so the share is saved up until
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
        """Sizes that texts are embedded in, prepared or not."""
        ...

    def run_bucket(self, bucket: Bucket, graph: bool) -> None:
        """Run a bucket on padding."""
        ...

    def warm_sampler(self, buckets: Sequence[Bucket]) -> None:
        """Sample in every way that passes in these buckets do."""
        ...

    def warm_swaps(self) -> None:
        """Swap blocks in every size, if blocks are ever swapped."""
        ...

    def warm_embedder(self) -> None:
        """Embed texts of every size, if texts are to be embedded."""
        ...


class WarmUp:
    """One warm-up.

    Args:
        config: How.
        habana: The device.
        capture: Makes graphs.
        watch: Is told what is prepared.
        clock: For the duration.
        steps: Does the work.
        agreement: Of the ranks, each of which has its own clock: all prepare the same bucket at the same time.

    Attributes:
        pace: Of what is put off; is to be told of steps.
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
        """Warm up; see ``Backend.warm_up``.

        Raises:
            OutOfMemoryError: Graphs do not fit, and that is to be an error.
        """
        start_s, free = self._clock.now_s(), self._habana.free_bytes()
        with self._watch.compilations(warns=False) as compiled:
            if self._config.mode == "eager":
                # Each operation is compiled by itself when it is first run: there is nothing that a bucket would prepare.
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
        """Prepare one of the postponed buckets, if the pace allows it; returns it.

        Args:
            is_idle: Nothing is being served.
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
            # An engine that serves goes on: its larger graphs are there already.
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
            self._check()  # the other buckets would take their time, and break at the same place
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
            return  # captured again, for memory was short
        self._prepared.append(bucket)
        self._watch.warmed_up(bucket)
        if progress is not None:
            progress(len(self._prepared), total)

    def _all_done(self, buckets: Sequence[Bucket], progress: Callable[[int, int], None] | None) -> None:
        for bucket in buckets:
            self._note(bucket, len(buckets), progress)


@contextlib.contextmanager
def compile_only(habana: Habana) -> Iterator[None]:
    """Compile, and run nothing, where the bridge can do that."""
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
    """Make it an error if torch.compile gives up on a piece of code: it would run one operation at a time from then on.

    Yields what raises the error as soon as a graph is broken; at the end it is called again.

    Raises:
        BackendError: It did, broke a graph, or failed.
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

    # PyTorch 2.6 calls both after a cache; later versions keep that name of the setting, not of the exception.
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
    # Another engine of this process may have compiled the same code, which torch.compile counts for good.
    before = most_compiled()
    dynamo.cache_size_limit = max(limit + before, dynamo.cache_size_limit)
    dynamo.accumulated_cache_size_limit = max(total + before, dynamo.accumulated_cache_size_limit)


def representatives(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return the smallest, a middling and the largest of some buckets, each once. Pure."""
    order = sorted(buckets, key=lambda bucket: (bucket.num_tokens, bucket.num_blocks, bucket))
    return [order[index] for index in sorted({0, len(order) // 2, len(order) - 1})] if order else []


def required_first(buckets: Sequence[Bucket]) -> tuple[list[Bucket], int]:
    """Return buckets with those in front that cover all others, then the largest; second, how many those in front are. Pure."""
    order = sorted(buckets, key=lambda bucket: (_size(bucket), bucket), reverse=True)
    front: list[Bucket] = []
    for bucket in order:
        if not any(_covers(larger, bucket) for larger in front):
            front.append(bucket)
    covering = set(front)
    return [*front, *(bucket for bucket in order if bucket not in covering)], len(front)


def _covers(larger: Bucket, smaller: Bucket) -> bool:
    """Whether the larger bucket covers the smaller. Larger ones come first, so none in front is covered by a later one."""
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
    """Decides from the time of steps and of pieces of work. One thread.

    Args:
        clock: Read.
        quiet_s: How long no step must have run for the backend to be idle, seconds.
        step_s: What each step saves for the work, seconds; 0: it is done in quiet moments alone.
        expected_s: How long the first piece is taken to be, seconds.
    """

    def __init__(self, clock: Clock, *, quiet_s: float, step_s: float, expected_s: float) -> None:
        self._clock = clock
        self._quiet_s = quiet_s
        self._step_s = step_s
        self._expected_s = expected_s
        self._saved_s = 0.0
        self._last_step_s: float | None = None

    def stepped(self) -> None:
        """Note that a step was submitted."""
        self._last_step_s = self._clock.now_s()
        # What is saved while there is nothing to do must not be spent at once.
        self._saved_s = min(self._saved_s + self._step_s, self._expected_s + self._step_s)

    def allows(self, *, is_idle: bool) -> bool:
        """Return whether a piece of work may run now. Pure.

        Args:
            is_idle: Nothing is being served.
        """
        if not is_idle:
            return self._step_s > 0 and self._saved_s >= self._expected_s
        return self._last_step_s is None or self._clock.now_s() - self._last_step_s >= self._quiet_s

    def took(self, seconds: float, *, is_idle: bool) -> None:
        """Note how long a piece took: the next one is expected to take as long."""
        self._expected_s = seconds
        if not is_idle:
            self._saved_s = max(0.0, self._saved_s - seconds)
