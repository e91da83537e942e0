"""Step times fitted to requests: of known step times, of published runs, and what is said of a fit that cannot be made."""

from __future__ import annotations

import json
import math
from pathlib import Path

import attrs
import pytest

from support.simulation import config_of
from trencadis.cli import main
from trencadis.errors import ConfigError
from trencadis_tools.simulation import simulate
from trencadis_tools.simulation.measured_requests import MeasuredRequest, MeasuredRun, read_measured
from trencadis_tools.simulation.request_fit import TERMS, fit_requests, latency_errors, predicted
from trencadis_tools.simulation.step_times import LinearStepTimes, load_step_times
from trencadis_tools.workloads import load_workload

TRUE = LinearStepTimes(base_s=0.01, token_s=0.0, prefill_token_s=4e-5, context_s=2e-7, row_s=3e-4)
SIZES = {
    "engine": {"max_num_seqs": 64, "max_num_batched_tokens": 512},
    "cache": {"num_blocks": 4000, "block_size": 16},
    "scheduling": {"name": "fcfs"},
}
RUNS = Path(__file__).parents[5] / "shared/data/calibration/vllm_runs"
WORKLOAD = """
num_requests = 80
[arrivals]
rate = 5.0
[lengths]
prompt = { kind = "uniform", min = 20, max = 900 }
output = { kind = "uniform", min = 2, max = 90 }
"""


@pytest.fixture
def config():
    return config_of(**SIZES)


@pytest.fixture
def measured(config, tmp_path) -> MeasuredRun:
    """Requests that an engine with the step times TRUE answered."""
    (tmp_path / "load.toml").write_text(WORKLOAD)
    workload = load_workload(str(tmp_path / "load.toml"))
    run = simulate(*config, workload, step_times=TRUE)
    started = [
        attrs.evolve(one.request, arrival_s=one.request.arrival_s - workload.requests[0].arrival_s)
        for one in run.records
    ]
    requests = tuple(
        MeasuredRequest(request=request, ttft_s=one.ttft_s, decode_s=one.finished_s - one.first_token_s)
        for request, one in zip(started, run.records, strict=True)
    )
    return MeasuredRun(name="made.jsonl", requests=requests)


def test_known_step_times_are_found_again_and_predict_what_was_held_out(config, measured) -> None:
    fit = fit_requests(*config, measured, num_fitted=50)
    assert fit.times.base_s == pytest.approx(TRUE.base_s, rel=0.05)
    assert fit.times.prefill_token_s == pytest.approx(TRUE.prefill_token_s, rel=0.05)
    assert fit.times.context_s == pytest.approx(TRUE.context_s, rel=0.2)
    assert fit.times.row_s == pytest.approx(TRUE.row_s, rel=0.1)
    assert all(term.told > 0.9 for term in fit.terms.values())
    for name, one in latency_errors(measured, fit.run, first=50).items():
        assert abs(one.mean) < 0.02, name
        assert one.num_requests == 30
    assert fit_requests(*config, measured, num_fitted=50) == fit


def test_the_first_turn_is_enough_where_the_schedule_does_not_change(config) -> None:
    """Requests far apart: each waits for its own steps alone, which is linear."""
    run = predicted(*config, spaced(TRUE, config), TRUE)
    fit = fit_requests(*config, spaced(TRUE, config), num_fitted=30, leave_out=["row_s"])
    assert fit.times.prefill_token_s == pytest.approx(TRUE.prefill_token_s, rel=0.02)
    # Alone, a step's row is part of its base.
    assert fit.times.base_s == pytest.approx(TRUE.base_s + TRUE.row_s, rel=0.02)
    assert latency_errors(spaced(TRUE, config), run)["E2E"].each == pytest.approx(0, abs=1e-9)


def spaced(times, config) -> MeasuredRun:
    row = {"num_output_tokens": 20}
    lengths = [100 + 10 * index for index in range(30)]
    requests = [
        MeasuredRequest(
            request=attrs.evolve(
                load_workload("poisson", limit=1).requests[0],
                request_id=str(index),
                arrival_s=5.0 * index,
                num_prompt_tokens=length,
                max_tokens=0,
                **row,
            ),
            ttft_s=1.0,
            decode_s=1.0,
        )
        for index, length in enumerate(lengths)
    ]
    run = simulate(*config, MeasuredRun(name="spaced", requests=tuple(requests)).workload, step_times=times)
    return MeasuredRun(
        name="spaced",
        requests=tuple(
            attrs.evolve(one, ttft_s=record.ttft_s, decode_s=record.finished_s - record.first_token_s)
            for one, record in zip(requests, run.records, strict=True)
        ),
    )


def test_what_the_requests_do_not_tell_stays_as_the_fit_began(config) -> None:
    measured = spaced(TRUE, config)
    fit = fit_requests(*config, measured, num_fitted=30, start=TRUE)
    assert fit.terms["row_s"].told < 0.5
    for name in TERMS:
        assert getattr(fit.times, name) == pytest.approx(getattr(TRUE, name), rel=0.01)


def test_a_fit_begins_with_the_step_times_that_are_nearest_to_a_sheet(config, measured) -> None:
    fit = fit_requests(*config, measured, num_fitted=50, start=load_step_times("h100:llama_3_1_8b"))
    assert fit.times.base_s == pytest.approx(TRUE.base_s, rel=0.1)
    assert fit.times.prefill_token_s == pytest.approx(TRUE.prefill_token_s, rel=0.1)


def test_too_few_requests_an_unknown_coefficient_and_a_refused_request_are_said(config, measured) -> None:
    with pytest.raises(ConfigError, match=r"made.jsonl: 19 requests are too few to fit 4 coefficients: 20 are needed"):
        fit_requests(*config, measured, num_fitted=19)
    with pytest.raises(ConfigError, match="no coefficient host_base_s to leave out"):
        fit_requests(*config, measured, num_fitted=50, leave_out=["host_base_s"])
    with pytest.raises(ConfigError, match="every coefficient is left out"):
        fit_requests(*config, measured, num_fitted=50, leave_out=list(TERMS))
    small = config_of(**SIZES | {"cache": {"num_blocks": 20, "block_size": 16}})
    with pytest.raises(ConfigError, match=r"the simulated engine refuses a request of .* Set cache.num_blocks"):
        fit_requests(*small, measured, num_fitted=50)


@pytest.fixture
def bench(measured, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRENCADIS_LOG__LEVEL", "warning")
    rows = [
        {
            "arrival_s": one.request.arrival_s,
            "num_prompt_tokens": one.request.num_prompt_tokens,
            "num_output_tokens": one.request.num_output_tokens,
            "ttft_s": one.ttft_s,
            "e2e_s": one.ttft_s + one.decode_s,
        }
        for one in measured.requests
    ]
    Path("made.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [f"--{table}.{key}={value}" for table, keys in SIZES.items() for key, value in keys.items()]

    def run(*words: str) -> tuple[int, str]:
        code = main(["bench", "fit", *words, *flags])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


def test_the_command_prints_held_out_errors_and_writes_step_times_that_are_read(bench) -> None:
    code, told = bench("--requests", "made.jsonl", "--out", "fitted.json", "--held-out", "0.4")
    assert code == 0, told
    assert "48 of 80 requests fitted" in told
    assert "max_num_seqs 64, max_num_batched_tokens 512, num_blocks 4000" in told
    assert "held out, 32" in told
    times = load_step_times("fitted.json")
    assert isinstance(times, LinearStepTimes)
    assert times.base_s == pytest.approx(TRUE.base_s, rel=0.05)
    written = json.loads(Path("fitted.json").read_text())
    assert written["provenance"]["engine"]["scheduling"] == "fcfs"
    assert math.isfinite(written["errors"]["held out"]["TTFT"]["p99"])


@pytest.mark.slow
@pytest.mark.skipif(not RUNS.is_dir(), reason="the measured runs of ../shared/data are not here")
def test_half_of_a_published_run_of_vllm_predicts_the_other_half() -> None:
    """300 requests of Llama 3.1 8B on an RTX PRO 6000; the second half waits for up to 20 s."""
    measured = read_measured(RUNS / "rtxpro6000_llama31_8b" / "requests.jsonl")
    sizes = {
        "engine": {"max_num_seqs": 128, "max_num_batched_tokens": 2048},
        "cache": {"num_blocks": 27000, "block_size": 16},
    }
    fit = fit_requests(*config_of(**SIZES | sizes), measured, num_fitted=150)
    for one in latency_errors(measured, fit.run, first=150).values():
        assert max(abs(one.mean), abs(one.p50), abs(one.p99)) < 0.03
