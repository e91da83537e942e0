"""Workloads and runs of a queue that is simulated by its definition, in a few lines: no engine is needed to compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from trencadis_tools.simulation import RequestRecord, Run
from trencadis_tools.workloads import Workload, WorkloadRequest


def poisson(*, num: int = 100, rate: float = 1.0, seed: int = 0) -> Workload:
    """Requests that come at random; every second one asks for two tokens, the others for eleven."""
    times_s = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, num))
    requests = tuple(
        WorkloadRequest(
            request_id=str(index),
            arrival_s=float(time_s),
            num_prompt_tokens=10,
            num_output_tokens=2 if index % 2 else 11,
            ttft_target_s=1.0,
            tpot_target_s=0.5,
        )
        for index, time_s in enumerate(times_s)
    )
    return Workload(name=f"poisson-{num}", requests=requests, seed=seed)


def served(
    workload: Workload,
    *,
    service_s: float = 0.5,
    tokens_s: float = 1.0,
    failed: Sequence[int] = (),
    offset_s: float = 0.0,
) -> Run:
    """One server, first come first served: a request waits, is served for ``service_s`` until its first token, and streams beside others."""
    free_s, records = 0.0, []
    for index, request in enumerate(workload.requests):
        if index in failed:
            nan = float("nan")
            record = RequestRecord(
                request=request, sent_s=request.arrival_s, first_token_s=nan, finished_s=nan, error="refused"
            )
        else:
            free_s = max(free_s, request.arrival_s) + service_s
            record = RequestRecord(
                request=request,
                sent_s=request.arrival_s,
                first_token_s=free_s + offset_s,
                finished_s=free_s + offset_s + tokens_s,
                num_output_tokens=request.num_output_tokens,
                num_cached_tokens=5,
                token_times_s=np.linspace(free_s + offset_s, free_s + offset_s + tokens_s, request.num_output_tokens),
            )
        records.append(record)
    return Run(
        records=tuple(records),
        duration_s=free_s + tokens_s,
        num_steps=1,
        num_scheduled_tokens=1,
        num_recomputed_tokens=0,
        num_preemptions=3,
        busy_s=(free_s,),
    )


@pytest.fixture
def make_workload() -> Callable[..., Workload]:
    return poisson


@pytest.fixture
def make_run() -> Callable[..., Run]:
    return served
