"""Graph capture: decides which buckets get graphs, including when memory for graphs is short.

    capture_all   every bucket, largest first ── too little memory? ─▶ from the start, smallest first, as many as fit
    budgeted      every bucket once without a graph, then graphs within the budget

With a budget, prefill and decode graphs each have a share. Buckets are tried in the order of a strategy; a bucket whose estimated
memory does not fit runs without a graph. Memory that one phase leaves is offered to the other in a second round. Buckets without graphs
are not captured later either.

Source: vllm-fork v0.5.3.post1-Gaudi-1.17.0, vllm/worker/habana_model_runner.py, with its second round for decodes corrected (there it
can never run). There a bucket is estimated by its tokens alone, here as :class:`GraphCosts` says.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence

import attrs
import torch

from trencadis.errors import OutOfMemoryError
from trencadis.records import Bucket, Phase, UnifiedBucket
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.emulated.device import EmulatedMemoryError
from trencadis_gaudi.graphs.costs import GraphCosts
from trencadis_gaudi.habana import Habana
from trencadis_gaudi.memory import format_bytes
from trencadis_gaudi.parallel.agreement import ONE_RANK, Agreement

__all__ = ["Capture", "describe", "log_bucket", "CaptureReport", "GraphBudget", "capture_order"]

logger = logging.getLogger("trencadis.gaudi")

_NAMES = {Phase.PREFILL: "Prompt", Phase.DECODE: "Decode"}


class Capture:
    """Captures the graphs of one backend, and keeps track of them.

    Args:
        config: Table ``[backend.gaudi]``, with the capture policy.
        habana: Device whose free memory is read.
        run: Runs a bucket on padding; the flag says whether as a graph.
        margin_bytes: Memory that must stay free, bytes.
        clear: Drops all graphs.
        agreement: Decisions of all ranks, which have separate memory and capture the same graphs.

    Attributes:
        graphs: Memory of each graph, bytes, by bucket.
    """

    def __init__(
        self,
        config: GaudiConfig,
        habana: Habana,
        *,
        run: Callable[[Bucket, bool], None],
        margin_bytes: float,
        clear: Callable[[], None],
        agreement: Agreement = ONE_RANK,
    ) -> None:
        self.graphs: dict[Bucket, int] = {}
        self._config = config
        self._habana = habana
        self._run = run
        self._margin = margin_bytes
        self._clear = clear
        self._agreement = agreement
        self._bounded = config.capture == "budgeted"

    @property
    def graph_bytes(self) -> int:
        """Memory of all graphs, bytes."""
        return sum(self.graphs.values())

    def as_graph(self, bucket: Bucket) -> bool:
        """Return whether a bucket runs as a graph; without a bound on graphs, also buckets that were not warmed up do. Pure."""
        return bucket in self.graphs or (self._config.captures and not self._bounded)

    def bucket(self, bucket: Bucket) -> int:
        """Capture one bucket; return the memory that it took, bytes, the maximum over ranks.

        Raises:
            OutOfMemoryError: The graph does not fit, here or on another rank.
        """
        before = self._habana.free_bytes()
        failed: Exception | None = None
        try:
            self._run(bucket, True)
        except (EmulatedMemoryError, torch.OutOfMemoryError) as error:
            failed = error
        if not self._agreement.all_hold(failed is None):
            why = failed or "another rank has none."
            raise OutOfMemoryError(f"No room for the graph of {bucket}: {why}") from failed
        used = self._agreement.most(max(0, before - self._habana.free_bytes()))
        self.graphs[bucket] = used
        return used

    def _room(self) -> int:
        """Return the free memory beyond the margin, bytes, the minimum over ranks."""
        return self._agreement.least(math.floor(self._habana.free_bytes() - self._margin))

    def within_margin(self, bucket: Bucket) -> None:
        """Capture one bucket, leaving the margin free.

        Raises:
            OutOfMemoryError: The graph does not fit, or leaves less memory free than the margin. No new shape becomes a graph from
                then on.
        """
        try:
            self.bucket(bucket)
            room = self._room()
            if room < 0:
                raise OutOfMemoryError(
                    f"{format_bytes(room + self._margin)} are free, less than the margin of {format_bytes(self._margin)}."
                )
        except OutOfMemoryError:
            self._bounded = True
            raise

    def every(self, buckets: Sequence[Bucket], *, done: Callable[[Bucket], None]) -> None:
        """Capture every bucket in the given order; if memory is short, as many as fit, smallest first.

        Raises:
            OutOfMemoryError: Memory is short, and ``on_memory_shortage`` is ``fail``.
        """
        for bucket in buckets:
            if bucket in self.graphs:
                continue
            try:
                self.within_margin(bucket)
            except OutOfMemoryError as error:
                self._fail_if_asked(error)
                logger.warning("%s Memory for graphs is short: capturing again, the smallest buckets first.", error)
                self._as_many_as_fit(buckets, done=done)
                return
            done(bucket)

    def _fail_if_asked(self, error: OutOfMemoryError) -> None:
        if self._config.on_memory_shortage == "fail":
            raise OutOfMemoryError(
                f"{error} {len(self.graphs)} graphs take {format_bytes(self.graph_bytes)}.",
                hint="Raise backend.gaudi.graph_reserve, prepare fewer buckets, or set backend.gaudi.on_memory_shortage to skip.",
            ) from error

    def _as_many_as_fit(self, buckets: Sequence[Bucket], *, done: Callable[[Bucket], None]) -> None:
        """Start over, smallest first; buckets without a graph are run once so that they are compiled."""
        self._clear()
        self.graphs.clear()
        self._bounded = True
        skipped = []
        # Bytes per token by phase, from the last graph.
        rates = dict.fromkeys(Phase, 0.0)
        for bucket in sorted(buckets, key=_weight):
            room = self._room()
            fits = rates[bucket.phase] * _weight(bucket)[0] < room
            try:
                if fits:
                    rates[bucket.phase] = self.bucket(bucket) / _weight(bucket)[0]
            except OutOfMemoryError:
                fits = False
            if not fits:
                skipped.append(bucket)
                self._run(bucket, False)
            done(bucket)
        if skipped:
            logger.warning(
                "%d of %d buckets run without a graph for lack of memory: %s",
                len(skipped),
                len(buckets),
                describe(skipped),
            )

    def budgeted(self, prefills: Sequence[Bucket], decodes: Sequence[Bucket]) -> tuple[CaptureReport, CaptureReport]:
        """Capture as many graphs as fit into the memory beyond the margin; both phases must have run before.

        Raises:
            OutOfMemoryError: No graph fits.
        """
        budget = self._room()
        free = budget + self._margin
        ratio = self._config.prompt_ratio
        logger.info(
            "Using %s/%s of free device memory for HPUGraphs, %s for prompt and %s for decode (VLLM_GRAPH_PROMPT_RATIO=%g)",
            format_bytes(budget),
            format_bytes(free),
            format_bytes(ratio * budget),
            format_bytes((1 - ratio) * budget),
            ratio,
        )
        orders = (
            capture_order(prefills, self._config.prompt_order),
            capture_order(decodes, self._config.decode_order),
        )

        def capture(bucket: Bucket, index: int) -> int:
            used = self.bucket(bucket)
            of = len(orders[bucket.phase is Phase.DECODE])
            log_bucket(f"Graph/{_NAMES[bucket.phase]}", bucket, index + 1, of, self._habana.free_bytes())
            return used

        reports = GraphBudget(budget, prompt_ratio=ratio, capture=capture).run(*orders) if budget > 0 else ()
        if not reports or not self.graphs:
            raise OutOfMemoryError(
                f"{format_bytes(budget)} for graphs ({format_bytes(free)} are free, {format_bytes(self._margin)} of them the "
                "margin) do not pay for one.",
                hint="Raise backend.gaudi.graph_reserve, or set backend.gaudi.capture to capture_all.",
            )
        for name, report in zip(("Prompt", "Decode"), reports, strict=True):
            logger.info(
                "Graph/%s captured:%d (%.1f%%) used_mem:%s buckets:%s",
                name,
                len(report.captured),
                100 * report.captured_ratio,
                format_bytes(report.used_bytes),
                describe(report.captured),
            )
        return reports[0], reports[1]


def log_bucket(what: str, bucket: Bucket, number: int, total: int, free_bytes: int) -> None:
    """Log one line of a warm-up in the vendor's format."""
    if isinstance(bucket, UnifiedBucket):
        logger.info(
            "[Warmup][Unified CFG][%d/%d] query_len:%d shared_blocks:%d unique_blocks:%d (%s) free_mem:%s",
            number,
            total,
            bucket.query_len,
            bucket.num_blocks,
            bucket.num_unique_blocks,
            "causal" if bucket.is_causal else "non causal",
            format_bytes(free_bytes),
        )
        return
    logger.info(
        "[Warmup][%s][%d/%d] batch_size:%d query_len:%d num_blocks:%d free_mem:%s",
        what,
        number,
        total,
        bucket.batch_size,
        bucket.query_len,
        bucket.num_blocks,
        format_bytes(free_bytes),
    )


def describe(buckets: Sequence[Bucket]) -> list[tuple[int, int, int]]:
    """Return the sizes of buckets, ascending. Pure."""
    return sorted((bucket.batch_size, bucket.query_len, bucket.num_blocks) for bucket in buckets)


def _weight(bucket: Bucket) -> tuple[int, int]:
    """Return a sort key of a graph's memory: tokens plus blocks, then tokens."""
    unique = bucket.num_unique_blocks if isinstance(bucket, UnifiedBucket) else 0
    return bucket.num_tokens + bucket.num_blocks + unique, bucket.num_tokens


def capture_order(buckets: Iterable[Bucket], strategy: str) -> list[Bucket]:
    """Return buckets in the order of capture. Pure.

    Args:
        buckets: Buckets of one phase.
        strategy: ``min_tokens``: fewest tokens first; ``max_bs``: largest batch first.
    """
    if strategy == "max_bs":
        return sorted(buckets, key=lambda bucket: (-bucket.batch_size, _length(bucket)))
    return sorted(buckets, key=lambda bucket: (bucket.batch_size * _length(bucket), _length(bucket), bucket.batch_size))


def _length(bucket: Bucket) -> int:
    """Return the second size of a bucket besides its batch: queries of a prefill, blocks of a decode."""
    return bucket.num_blocks if bucket.phase is Phase.DECODE else bucket.query_len


@attrs.define
class CaptureReport:
    """Captured graphs of one phase.

    Attributes:
        order: All buckets, in the order in which they are tried.
        captured: Captured buckets, in the order of capture.
        used_bytes: Memory of the graphs, bytes.
        is_complete: Whether every bucket is captured.
        costs: Estimates of graph memory of the phase.
    """

    order: list[Bucket]
    captured: list[Bucket] = attrs.field(factory=list)
    used_bytes: int = 0
    is_complete: bool = False
    costs: GraphCosts = attrs.field(factory=GraphCosts)

    @property
    def captured_ratio(self) -> float:
        """Share of the buckets that are captured; 1 without buckets."""
        return len(self.captured) / len(self.order) if self.order else 1.0


class GraphBudget:
    """Captures graphs within a memory budget.

    Args:
        budget_bytes: Memory for all graphs, bytes.
        prompt_ratio: Share of the budget for prefills in the first round, 0 to 1.
        capture: Captures one bucket, given its index in the order; returns the memory that it took, bytes (the maximum over ranks).
    """

    def __init__(self, budget_bytes: int, *, prompt_ratio: float, capture: Callable[[Bucket, int], int]) -> None:
        self._budget = budget_bytes
        self._prompt_budget = prompt_ratio * budget_bytes
        self._capture = capture

    def run(self, prefills: list[Bucket], decodes: list[Bucket]) -> tuple[CaptureReport, CaptureReport]:
        """Capture both phases; buckets are in the order of capture."""
        prompt, decode = CaptureReport(prefills), CaptureReport(decodes)
        self._round(prompt, self._prompt_budget)
        self._round(decode, self._budget - self._prompt_budget)
        left = self._budget - prompt.used_bytes - decode.used_bytes
        if left > 0 and decode.is_complete and not prompt.is_complete:
            self._round(prompt, left)
        elif left > 0 and prompt.is_complete and not decode.is_complete:
            self._round(decode, left)
        return prompt, decode

    def _round(self, report: CaptureReport, available: float) -> None:
        report.is_complete = True
        done = set(report.captured)
        for index, bucket in enumerate(report.order):
            # As in the source, the estimate is checked before whether the bucket is already captured, so that one that no longer fits
            # leaves the phase incomplete.
            if report.costs.estimate(bucket) >= available:
                report.is_complete = report.is_complete and bucket in done
                continue
            if bucket in done:
                continue
            used = self._capture(bucket, index)
            available -= used
            report.used_bytes += used
            report.costs.add(bucket, used)
            report.captured.append(bucket)
