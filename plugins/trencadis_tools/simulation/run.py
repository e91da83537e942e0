"""What became of a workload: one record for each request, and counts of the engines; the same for simulated and live runs."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import numpy as np

from trencadis.records import FloatArray
from trencadis_tools.simulated_store.store import KVTraffic
from trencadis_tools.workloads.workload import WorkloadRequest

__all__ = ["RequestRecord", "Run", "token_gaps_s"]


@attrs.frozen(kw_only=True)
class RequestRecord:
    """One request. Times are seconds since the start of the run; those of what did not come are NaN.

    Attributes:
        request: Request of the workload.
        sent_s: When it was sent: ``arrival_s``, or later if it follows another one.
        first_token_s: When its first token came.
        finished_s: When its last one came.
        replica: Index of the engine that served it, the last one if several did.
        num_cached_tokens: Prompt tokens taken from the prefix cache.
        num_output_tokens: That came.
        num_preemptions: How often it lost its place.
        error: Why it was refused or failed; empty if it was answered.
        token_times_s: When each of its tokens came, float64 ``[num_output_tokens]``; None: that was not asked for.
    """

    request: WorkloadRequest
    sent_s: float
    first_token_s: float
    finished_s: float
    replica: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    error: str = ""
    token_times_s: FloatArray | None = attrs.field(
        default=None, eq=attrs.cmp_using(eq=np.array_equal), hash=False, repr=False
    )

    @property
    def ttft_s(self) -> float:
        """From sent to the first token."""
        return self.first_token_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """From the first token to the last, for each token after the first; NaN with one token."""
        if self.num_output_tokens < 2:
            return float("nan")
        return (self.finished_s - self.first_token_s) / (self.num_output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """From sent to the last token."""
        return self.finished_s - self.sent_s

    @property
    def max_itl_s(self) -> float:
        """The longest time between two tokens that follow each other; NaN with one token, or if times of tokens were not asked for."""
        if self.token_times_s is None or len(self.token_times_s) < 2:
            return float("nan")
        return float(np.diff(self.token_times_s).max())


def token_gaps_s(records: Iterable[RequestRecord]) -> FloatArray:
    """Return the times between two tokens that follow each other in an answer, of all answers, float64 ``[num_gaps]``. Pure.

    Args:
        records: With times of tokens; others count as if they had no token.
    """
    gaps = [np.diff(record.token_times_s) for record in records if record.token_times_s is not None]
    return np.concatenate(gaps) if gaps else np.empty(0)


@attrs.frozen(kw_only=True)
class Run:
    """One workload under one configuration.

    Attributes:
        records: One for each request, in the workload's order.
        duration_s: From the start to the last token.
        num_steps: Number of steps of all engines.
        num_scheduled_tokens: Tokens computed, all engines together.
        num_recomputed_tokens: Number of tokens that were computed again.
        num_preemptions: Number of preemptions of all engines.
        busy_s: Seconds that each replica computed.
        end_s: When the last step ended, perhaps after the last token.
        num_prompt_tokens_admitted: Prompt tokens of requests that began to run.
        num_prompt_tokens_cached: Number of tokens of prompts that were taken from prefix caches.
        num_plans: Steps that engines planned; on simulated devices some stand for several.
        num_moved: Times that a request had to leave a replica that failed.
        num_buckets: That an engine prepares at its start, on a device with static shapes.
        num_draft_tokens: Drafts that were verified.
        num_accepted_tokens: Number of drafts that became part of an answer.
        num_rebalanced: Times that the router moved a request from a replica that served.
        num_refused_moves: Moves that the router asked for and that were not made.
        kv: Traffic to and from KV stores; None: there were none.
        policy_reads: Columns of the view and fields of requests that the scheduling policy read; None: that was not watched.
    """

    records: tuple[RequestRecord, ...] = attrs.field(repr=lambda records: f"<{len(records)} requests>")
    duration_s: float
    num_steps: int
    num_scheduled_tokens: int
    num_recomputed_tokens: int
    num_preemptions: int
    busy_s: tuple[float, ...]
    end_s: float = 0.0
    num_prompt_tokens_admitted: int = 0
    num_prompt_tokens_cached: int = 0
    num_plans: int = 0
    num_moved: int = 0
    num_buckets: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rebalanced: int = 0
    num_refused_moves: int = 0
    kv: KVTraffic | None = None
    policy_reads: frozenset[str] | None = None
