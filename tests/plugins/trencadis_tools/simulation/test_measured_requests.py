"""Times of requests in each of the forms that are read, and what is refused by line."""

from __future__ import annotations

import json

import pytest

from trencadis.errors import ConfigError
from trencadis_tools.simulation.measured_requests import read_measured

OWN = {"arrival_s": 10.0, "num_prompt_tokens": 20, "num_output_tokens": 3, "ttft_s": 0.5, "tpot_s": 0.25}
RECORDED = {
    "request_id": "bench-0",
    "input_toks": 20,
    "output_toks": 3,
    "arrival_time": 1.7e9,
    "queued_ts": 10.0,
    "scheduled_ts": 10.1,
    "first_token_ts": 10.5,
    "last_token_ts": 11.0,
}
SERVED = {
    "date": "today",
    "start_times": [12.0, 10.0],
    "input_lens": [7, 20],
    "output_lens": [1, 3],
    "ttfts": [0.1, 0.5],
    "itls": [[], [0.2, 0.3]],
    "errors": ["", ""],
}


def read(tmp_path, *rows, name="requests.jsonl"):
    file = tmp_path / name
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return read_measured(file)


@pytest.mark.parametrize(
    "row",
    [
        OWN,
        RECORDED,
        {**{k: v for k, v in OWN.items() if k != "tpot_s"}, "e2e_s": 1.0},
        {**{k: v for k, v in OWN.items() if k not in ("ttft_s", "tpot_s")}, "first_token_s": 10.5, "finished_s": 11.0},
    ],
    ids=["TTFT and TPOT", "vLLM's clock", "E2E", "moments"],
)
def test_the_same_request_is_read_from_each_form(tmp_path, row):
    (one,) = read(tmp_path, row).requests
    assert (one.request.num_prompt_tokens, one.request.num_output_tokens, one.request.arrival_s) == (20, 3, 0.0)
    assert (one.ttft_s, one.decode_s) == pytest.approx((0.5, 0.5))


def test_lists_of_vllm_bench_serve_are_read_by_arrival_without_those_that_failed(tmp_path):
    run = read(tmp_path, SERVED)
    assert [(one.request.arrival_s, one.request.num_prompt_tokens) for one in run.requests] == [(0.0, 20), (2.0, 7)]
    assert [one.decode_s for one in run.requests] == pytest.approx([0.5, 0.0])
    failed = read(tmp_path, SERVED | {"errors": ["", "gone"], "ttfts": [0.1, 0.0]})
    assert (len(failed.requests), failed.num_failed) == (1, 1)


def test_rows_of_simulate_and_compare_are_read(tmp_path):
    head = "config,seed,num_prompt_tokens,num_cached_tokens,num_output_tokens,sent_s,first_token_s,finished_s,error"
    run = read(tmp_path, head, "fcfs,0,20,16,3,10,10.5,11,", "fcfs,0,20,0,3,11,,,too long", name="requests.csv")
    assert (len(run.requests), run.num_cached, run.num_failed) == (1, 1, 1)
    with pytest.raises(ConfigError, match="line 3: is of another run"):
        read(tmp_path, head, "fcfs,0,20,0,3,10,10.5,11,", "fair_share,0,20,0,3,10,10.5,11,", name="requests.csv")
