from __future__ import annotations

import math

import attrs
import numpy as np
import pytest

from support.simulation import asked
from trencadis.errors import ConfigError
from trencadis_tools.simulation import RequestRecord, Run
from trencadis_tools.tune.slo import parse_slo
from trencadis_tools.workloads import Workload


def run(*records: RequestRecord) -> Run:
    return Run(
        records=records,
        duration_s=10.0,
        num_steps=1,
        num_scheduled_tokens=1,
        num_recomputed_tokens=0,
        num_preemptions=0,
        busy_s=(1.0,),
    )


def answered(ttft_s: float, tpot_s: float = 0.01, tokens: int = 11, **targets: float) -> RequestRecord:
    finished_s = ttft_s + tpot_s * (tokens - 1)
    return RequestRecord(
        request=asked("a", **targets),
        sent_s=0.0,
        first_token_s=ttft_s,
        finished_s=finished_s,
        num_output_tokens=tokens,
        token_times_s=ttft_s + tpot_s * np.arange(tokens),
    )


def failed() -> RequestRecord:
    return RequestRecord(request=asked("a"), sent_s=0.0, first_token_s=math.nan, finished_s=math.nan, error="no place")


def test_every_form_is_read() -> None:
    slo = parse_slo("ttft_p99=1s, itl_mean<=100ms,tpot_p50=20ms,e2e_p95=2.5s,goodput>=0.9,ttft=500ms")
    assert [(limit.name, limit.limit_s) for limit in slo.limits] == [
        ("ttft_p99", 1.0),
        ("itl_mean", 0.1),
        ("tpot_p50", 0.02),
        ("e2e_p95", 2.5),
        ("ttft", 0.5),
    ]
    assert slo.goodput == 0.9


def test_goodput_of_a_workload_without_limits_is_refused() -> None:
    slo = parse_slo("goodput>=0.99")
    with pytest.raises(ConfigError, match='no request of the workload "plain" has any'):
        slo.check(Workload(name="plain", requests=(asked("a"),)))
    slo.check(Workload(name="own", requests=(asked("a", ttft_target_s=1.0),)))
    parse_slo("ttft=1s,goodput>=0.99").check(Workload(name="plain", requests=(asked("a"),)))


def test_the_strain_is_the_largest_ratio_of_value_and_limit() -> None:
    slo = parse_slo("ttft_mean=1s,itl_p99=20ms")
    assert slo.strain(run(answered(0.5, 0.01), answered(1.0, 0.015))) == pytest.approx(0.75)
    assert slo.strain(run(answered(0.5, 0.01), answered(0.6, 0.05))) == pytest.approx(2.5)
    alone = parse_slo("ttft_p99=1s,itl_p99=20ms")
    assert alone.strain(run(answered(0.5, tokens=1), answered(0.5, 0.01))) == pytest.approx(0.5)
    records = run(*(answered(number / 100) for number in range(1, 101)))
    for share in (50, 99):
        assert parse_slo(f"ttft_p{share}=1s").values(records) == {f"ttft_p{share}": pytest.approx(share / 100)}


def test_requests_without_an_answer_are_infinitely_late() -> None:
    slo = parse_slo("ttft_p50=1s")
    assert slo.strain(run(answered(0.5), answered(0.5), failed())) == 0.5
    assert slo.strain(run(answered(0.5), failed(), failed())) == math.inf
    assert parse_slo("ttft_mean=1s").strain(run(answered(0.5), failed())) == math.inf


def test_itl_is_every_time_between_tokens_and_tpot_the_mean_of_a_request() -> None:
    times_s = np.array([0.1, 0.2, 0.3, 1.3])
    stalled = attrs.evolve(answered(0.1, 0.4, tokens=4), token_times_s=times_s)
    found = run(stalled, answered(0.1, 0.1, tokens=7))
    slo = parse_slo("ttft_p99=1s,itl_p50=1s,itl_p90=1s,itl_mean=1s,tpot_p99=1s")
    assert slo.needs_token_times
    assert not parse_slo("ttft_p99=1s,tpot_p99=1s").needs_token_times
    expected = {"itl_p50": 0.1, "itl_p90": 1.0, "itl_mean": 0.2, "tpot_p99": 0.4}
    assert {name: slo.values(found)[name] for name in expected} == pytest.approx(expected)
    assert parse_slo("ttft=1s,itl=500ms,goodput>=0.9").goodput_of(found) == 0.5
    assert parse_slo("ttft=1s,tpot=500ms,goodput>=0.9").goodput_of(found) == 1.0
    assert parse_slo("ttft_p99=1s,itl_p99=1s").strain(run(stalled, failed())) == math.inf


def test_goodput_counts_limits_of_the_objective_and_of_the_request() -> None:
    slo = parse_slo("ttft=1s,goodput>=0.75")
    records = [answered(0.5), answered(2.0), answered(0.5, ttft_target_s=0.1), answered(0.5, 0.01, tpot_target_s=0.02)]
    assert slo.goodput_of(run(*records)) == 0.5
    assert slo.strain(run(*records)) == pytest.approx(2.0)
    assert slo.strain(run(*records[:1], *records[3:], answered(0.1), answered(3.0))) == pytest.approx(1.0)


def test_attainment_is_the_share_of_requests_below_every_limit() -> None:
    slo = parse_slo("ttft_p99=1s,itl_p99=20ms")
    assert slo.attainment(run(answered(0.5), answered(2.0), answered(0.5, 0.03), failed())) == 0.25
