"""Ratios, shares and goals from records whose numbers can be followed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from peers.beside import side_by_side
from peers.catalogue import PUBLISHED
from peers.command import summarised
from peers.goals import GOALS, judge, judge_commands
from peers.quality import NOT_SCORED, quality_of
from peers.rounds import same_tokens
from peers.shapes import SHAPES, Ceilings, decode_limit_s
from peers.summary import rows_of, spread, starts_of
from peers.table import render

MODEL = "llama-110m"
RATE = {"per_s": 20e9, "per_cpu_s": 10e9}
OPERATIONS = {"per_s": 200e9, "per_cpu_s": 100e9}


def run_of(engine: str, cpu_s: float, *, number: int = 0, workload: str = "batch32", **more: Any) -> dict[str, Any]:
    run = {"model": MODEL, "precision": "fp32", "group": 0, "round": number, "workload": workload, "engine": engine}
    times = {"wall_s": cpu_s / 2, "cpu_s": cpu_s, "first_wall_s": cpu_s / 8, "first_cpu_s": cpu_s / 4}
    return {**run, **times, "peak_rss": 2**30, "first_ratio": 1.0, "leading_ratio": 0.5, **more}


def start_of(engine: str, wall_s: float, files: str = "warm") -> dict[str, Any]:
    about = {"model": MODEL, "precision": "fp32", "group": 0, "engine": engine, "versions": {"python": "3.11"}}
    return {**about, "files": files, "wall_s": wall_s, "cpu_s": wall_s / 4, "rss": 2**20, "peak_rss": 2**21}


def results_of(*runs: dict[str, Any], starts: tuple[dict[str, Any], ...] = (), **more: Any) -> dict[str, Any]:
    rounds = dict.fromkeys((run["precision"], run["group"], run["round"]) for run in runs)
    ceilings = [
        {"model": MODEL, "precision": one, "group": two, "round": three, "read": RATE, "fp32": OPERATIONS}
        for one, two, three in rounds
    ]
    more = {"settings": {}, "commands": [], "quality": [], **more}
    return {"runs": list(runs), "starts": list(starts), "ceilings": ceilings, "unavailable": [], **more}


def row_of(results: dict[str, Any], engine: str) -> dict[str, Any]:
    (row,) = [row for row in rows_of(results) if row["engine"] == engine]
    return row


def goal_of(results: dict[str, Any], text: str) -> dict[str, Any]:
    (goal,) = [goal for goal in judge(MODEL, rows_of(results), starts_of(results)) if goal["goal"].startswith(text)]
    return goal


def test_spread_is_median_and_quartiles_and_equal_tokens_are_counted_up_to_the_first_difference() -> None:
    assert spread([4.0, 1.0, 3.0, 2.0, 5.0]) == {"median": 3.0, "low": 2.0, "high": 4.0, "num": 5}
    assert spread([7.0]) == {"median": 7.0, "low": 7.0, "high": 7.0, "num": 1}
    same = same_tokens([[1, 2, 3, 4], [1, 9, 3, 4]], [[1, 2, 3, 4], [1, 2, 3, 4]])
    assert same == {"first_ratio": 0.5, "leading_ratio": 5 / 8}
    for length, ratio in ((8, 1.0), (7, 0.0)):  # the first eight tokens count as the first
        assert same_tokens([[*range(length), *[0] * 12]], [[*range(20)]])["first_ratio"] == ratio


def test_rates_are_of_output_tokens_and_of_prompt_tokens_where_there_is_one_output() -> None:
    results = results_of(run_of("ours", 4.0), run_of("openvino", 8.0, workload="prefill8x512"))
    assert row_of(results, "ours")["tokens_per_cpu_s"]["median"] == 32 * 64 / 4.0
    assert row_of(results, "ours")["tokens_per_s"]["median"] == 32 * 64 / 2.0
    assert row_of(results, "openvino")["tokens_per_cpu_s"]["median"] == 8 * 512 / 8.0


def test_a_ratio_pairs_rounds_of_a_group_before_it_takes_the_median() -> None:
    ours = [run_of("ours", cpu_s, number=number) for number, cpu_s in enumerate((1.0, 10.0, 100.0))]
    peer = [run_of("vllm", cpu_s, number=number) for number, cpu_s in enumerate((3.0, 20.0, 100.0))]
    assert row_of(results_of(*ours, *peer), "vllm")["ratio"] == {"median": 2.0, "low": 1.5, "high": 2.5, "num": 3}
    assert row_of(results_of(run_of("ours", 1.0), run_of("vllm", 3.0, group=1)), "vllm")["ratio"] is None
    # Runs without transformers beside them do not count for equality.
    alone = {name: value for name, value in run_of("ours", 1.0, group=1).items() if not name.endswith("_ratio")}
    row = row_of(results_of(run_of("ours", 1.0), alone), "ours")
    assert (row["first_ratio"], row["leading_ratio"]) == (1.0, 0.5)


def test_a_share_leaves_out_the_time_to_the_first_tokens_and_needs_a_ceiling() -> None:
    row = row_of(results_of(run_of("ours", 40.0)), "ours")
    machine = Ceilings(read=10e9, multiply=100e9)
    limit_s = decode_limit_s(SHAPES[MODEL], machine, weight_bytes=4, num_sequences=32, context_len=129, num_steps=63)
    assert row["share"]["median"] == pytest.approx(limit_s / (40.0 - 10.0))
    assert row["wall_share"]["median"] == pytest.approx(limit_s / 2 / (20.0 - 5.0))
    assert row_of(results_of(run_of("ours", 40.0, precision="int8")), "ours")["share"] is None


def test_a_goal_is_judged_by_who_comes_closest_to_ours_and_never_by_ours_again() -> None:
    runs = [run_of("ours", 1.0), run_of("ours_again", 0.5), run_of("vllm", 3.0), run_of("openvino", 1.8)]
    goal = goal_of(results_of(*runs, run_of("ours_compiled", 1.1)), "batch of 32 against the best peer, fp32")
    assert (goal["measured"], goal["met"], goal["by"]) == (1.8, True, pytest.approx(0.2))
    assert "OpenVINO" in goal["note"]
    assert "A/A 0.50" in goal["note"]
    goal = goal_of(results_of(run_of("ours", 1.0), run_of("vllm", 0.75)), "batch of 32 against the best peer, fp32")
    assert (goal["met"], goal["by"]) == (False, pytest.approx(-0.5))
    goals = judge(MODEL, rows_of(results_of(run_of("ours", 1.0))), [])
    missing = [goal for goal in goals if goal["goal"] != "decode, batch 32, share of the limit"]
    assert len(goals) == len([goal for goal in GOALS if goal.precision != PUBLISHED])
    assert all(goal["met"] is None and goal["note"].startswith("not measured") for goal in missing)


def test_start_up_is_theirs_by_ours_and_a_goal_that_is_a_limit_is_met_below_it() -> None:
    starts = (start_of("ours", 8.0), start_of("vllm", 100.0))
    goal = goal_of(results_of(run_of("ours", 1.0), starts=starts), "start-up")
    assert (goal["measured"], goal["met"]) == (12.5, True)
    starts = ({**start_of("ours", 12.0), "precision": "int8"}, {**start_of("ours", 80.0, "cold"), "precision": "int8"})
    (goal,) = [goal for goal in judge(MODEL, [], starts_of(results_of(starts=starts))) if goal["at_most"]]
    assert (goal["measured"], goal["met"], goal["by"]) == (3.0, True, -0.25)
    commands = [{"command": "trencadis serve", "cpu_s": cpu_s, "wall_s": 1.0} for cpu_s in (9.0, 4.0, 4.25)]
    judged = [(goal["measured"], goal["met"]) for goal in judge_commands(commands)]
    assert judged == [(None, None), (4.25, True)]


def test_a_published_file_has_goals_of_its_own() -> None:
    about = {"model": "gemma3-270m", "precision": PUBLISHED}
    starts = [{**start_of("ours", 8.0), **about}, {**start_of("ours", 80.0, "cold"), **about}]
    starts.append({**start_of("llama_cpp", 4.0), **about})
    goals = {goal["goal"]: goal for goal in judge("gemma3-270m", [], starts_of(results_of(starts=tuple(starts))))}
    assert len(goals) == len([goal for goal in GOALS if goal.precision == PUBLISHED])
    assert [goals[name]["met"] for name in ("first token, CPU s", "first token, cold, CPU s")] == [True, False]
    assert goals["first token, CPU s"]["note"] == "llama.cpp, its server (xllamacpp) 1"
    assert goals["highest memory while loading, MiB"]["measured"] == 2.0


def test_quality_is_perplexity_of_texts_and_distance_from_our_fp32() -> None:
    def score(precision: str, engine: str, *logprobs: float, is_text: bool = True) -> dict[str, Any]:
        about = {"model": MODEL, "precision": precision, "engine": engine, "is_text": is_text}
        return {**about, "logprobs": [[-99.0] * NOT_SCORED + list(logprobs)]}

    ours, rounded, peer = quality_of(
        [score("fp32", "ours", -1.0, -3.0), score("int8", "ours", -1.5, -2.0), score("int8", "openvino", -1.0, -3.0)]
    )
    assert ours["perplexity"] == pytest.approx(math.e**2)
    assert (ours["from_fp32"], rounded["from_fp32"], peer["from_fp32"]) == (None, 0.75, 0.0)
    lacking = score("int4", "openvino", math.nan, -5.0)
    assert [row["num_scored"] for row in quality_of([score("fp32", "ours", -1.0, -3.0), lacking])] == [1, 1]
    assert quality_of([score("fp32", "ours", -1.0, -3.0), lacking])[1]["from_fp32"] == 2.0
    (drawn,) = quality_of([score("int8", "ours", -1.0, is_text=False)])
    assert (drawn["perplexity"], drawn["from_fp32"], drawn["num_scored"]) == (None, None, 1)


def test_runs_side_by_side_show_the_best_peer_of_each() -> None:
    def results(mask: str, *runs: dict[str, Any]) -> dict[str, Any]:
        machine = {"flags": ["avx2", "avx512f"], "processor": "P"}
        return summarised(results_of(*runs, machine=machine, settings={"instructions": mask}))

    wide = results("", run_of("ours", 1.0), run_of("vllm", 3.0), run_of("openvino", 2.0))
    masked = results("avx2", run_of("ours", 2.0), run_of("vllm", 3.0), run_of("openvino", 8.0, workload="single"))
    head, lines = side_by_side([wide, masked])
    assert head[3:] == ["AVX-512 (P)", "AVX2, by hiding the rest (P)"]
    assert lines == [[MODEL, "fp32", "batch32", "2.00 (OpenVINO GenAI)", "1.50 (vLLM, CPU build)"]]


def test_the_page_shows_ratios_goals_reasons_and_versions() -> None:
    machine = {"processor": "P", "cores": 2, "memory_bytes": 2**34, "system": "S", "load": 0.5, "steal_ratio": 0.25}
    runs = [run_of("ours", 1.0), run_of("ours", 2.0, number=1), run_of("vllm", 3.0), run_of("vllm", 4.0, number=1)]
    results = results_of(*runs, starts=(start_of("ours", 8.0), start_of("vllm", 100.0)))
    results |= {"machine": machine, "settings": {"threads": 2}, "finished": "then"}
    results["unavailable"] = [{"model": MODEL, "precision": "int8", "engine": "vllm", "reason": "no | int8\nhere"}]
    quality = {"num_scored": 7, "perplexity": 12.3456, "from_fp32": 0.5}
    results["quality"] = [{"model": MODEL, "precision": "fp32", "engine": "vllm", **quality}]
    whole = summarised(results)
    page = render(whole, [whole])
    assert "| vLLM, CPU build |" in page
    assert "2.50 (2.25 to 2.75)" in page
    assert "| met by 67% | the best is vLLM, CPU build; no A/A pair |" in page
    assert "| met by 25% | wall time; of CPU time 12.5 |" in page
    assert "no / int8 here" in page
    assert "took 25% of the CPU time" in page
    assert "| vLLM, CPU build | 12.35 | 0.5000 | 7 |  |  |" in page
    assert "* AVX2: P, 2 cores" in page
    widths = [{line.count("|") for line in block.splitlines()} for block in page.split("\n\n") if block.startswith("|")]
    assert all(len(one) == 1 for one in widths)
