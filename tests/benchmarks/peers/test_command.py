"""The whole benchmark on a tiny model: ours and transformers in this environment; and bad input."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

import attrs
import pytest

from peers import command, models, rounds
from peers.catalogue import ENGINES, PRECISIONS, PUBLISHED, Engine
from peers.models import ModelError, files_of
from peers.shapes import SHAPES
from peers.texts import scored_texts, token_ids
from peers.workloads import SHORT, WORKLOADS, Workload

TINY = SHAPES["tiny"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    files_of(TINY, "hf", "fp32", cache)
    return cache


@pytest.mark.nightly
def test_the_model_has_the_weights_that_its_shape_counts(cache: Path) -> None:
    from safetensors import safe_open

    with safe_open(files_of(TINY, "hf", "fp32", cache) / "model.safetensors", framework="np") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 - no mapping
    assert sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2) == TINY.num_weights


def test_a_trained_model_is_fetched_by_its_own_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "fetch.py"
    script.write_text("import pathlib, sys; pathlib.Path(sys.argv[1]).mkdir()")
    monkeypatch.setattr(models, "TRAINED", script)
    assert list(files_of(SHAPES["smollm2-135m"], "hf", "fp32", tmp_path).iterdir()) == []


@pytest.mark.nightly
def test_prompts_of_a_trained_model_are_passages_of_text(cache: Path) -> None:
    beginning, text = token_ids(files_of(TINY, "hf", "fp32", cache))
    assert len(beginning) <= 1
    prompts = WORKLOADS["streams8"].prompts(seed=1, vocab_size=TINY.vocab_size, text=text)
    assert [len(prompt) for prompt in prompts] == [128] * 8
    for prompt in prompts:
        assert any(text[at : at + 128] == prompt for at, token in enumerate(text) if token == prompt[0])
    assert prompts != WORKLOADS["streams8"].prompts(seed=2, vocab_size=TINY.vocab_size, text=text)


@pytest.mark.nightly
def test_ours_and_transformers_do_the_same_work(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = attrs.evolve(ENGINES["transformers"], home="")
    monkeypatch.setitem(ENGINES, "transformers", here)
    monkeypatch.setattr(rounds, "READ_BYTES", 2**20)
    monkeypatch.setattr(rounds, "MATMUL_SIZE", 128)
    short = Workload(name="batch32", num_requests=3, prompt_len=9, output_len=12)
    monkeypatch.setitem(WORKLOADS, "batch32", short)
    paths = ["--cache", str(cache), "--json", str(tmp_path / "r.json"), "--table", str(tmp_path / "r.md")]
    asked = ["--engines", "ours", "transformers", "openvino", "--only", "batch32", "--precisions", "fp32"]
    assert command.main([*paths, *asked, "--model", "tiny", "--rounds", "2", "--threads", "1"]) == 0
    results = json.loads((tmp_path / "r.json").read_text())
    runs = results["runs"]
    order = ["ours 0", "transformers 0", "transformers 1", "ours 1"]
    assert [f"{run['engine']} {run['round']}" for run in runs] == order
    ours = [run for run in runs if run["engine"] == "ours"]
    assert all(run["leading_ratio"] == run["first_ratio"] == 1.0 for run in ours)
    assert not any("leading_ratio" in run for run in runs if run not in ours), (
        "the reference is not held against itself"
    )
    assert all(run["cpu_s"] > 0 and run["wall_s"] > 0 for run in runs)
    assert [one["engine"] for one in results["unavailable"]] == ["openvino"]
    assert [one["read"]["per_s"] > 0 < one["fp32"]["per_cpu_s"] for one in results["ceilings"]] == [True, True]
    assert results["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert "OpenVINO GenAI will not be measured: not prepared" in capsys.readouterr().err
    page = (tmp_path / "r.md").read_text()
    assert "transformers, static batch" in page
    assert "### tiny, fp32, 3 × (9 + 12)" in page
    quality = {one["engine"]: one for one in results["quality"]}
    assert quality["ours"]["from_fp32"] is None
    assert 0 <= quality["transformers"]["from_fp32"] < 1e-4
    assert all(one["files"] == "warm" and one["peak_rss"] >= one["rss"] for one in results["starts"])
    again = tmp_path / "again.md"
    assert command.main(["--render", "--json", str(tmp_path / "r.json"), "--table", str(again), "--beside"]) == 0
    assert again.read_text() == page.partition("## Side by side")[0] + page[page.index("## Measured") :]


def test_an_engine_that_makes_too_few_tokens_is_out() -> None:
    class Lazy:
        def ask(self, do: str, **question: object) -> dict[str, object]:
            return {"tokens": [[1, 2]], "wall_s": 1.0, "cpu_s": 1.0}

    asked = Workload(name="batch32", num_requests=1, prompt_len=4, output_len=3)
    phase = rounds.Phase(shape=TINY, precision="fp32", group=0, workloads=[asked])
    with pytest.raises(rounds.DriverError, match="2 tokens for 1 requests, not 3 for each of 1"):
        rounds._ask_run(Lazy(), asked, phase, seed=0)


def test_prompts_are_the_same_for_all_and_new_in_each_round_and_short_workloads_have_fewer_tokens() -> None:
    workload = WORKLOADS["streams8"]
    prompts = workload.prompts(seed=1, vocab_size=4096)
    assert prompts == workload.prompts(seed=1, vocab_size=4096) != workload.prompts(seed=2, vocab_size=4096)
    assert [len(prompt) for prompt in prompts] == [128] * 8
    assert all(5 <= token < 4096 for prompt in prompts for token in prompt)
    assert SHORT.keys() == WORKLOADS.keys()
    for name, short in SHORT.items():
        whole = WORKLOADS[name]
        assert (short.num_requests, short.is_prefill) == (whole.num_requests, whole.is_prefill)
        assert short.num_counted_tokens <= whole.num_counted_tokens
    assert [WORKLOADS["single"].title, WORKLOADS["prefill8x512"].title] == ["1 × (128 + 64)", "prefill 8 × 512"]


def test_what_is_scored_are_passages_after_what_the_model_expects_or_tokens_that_were_drawn() -> None:
    text = list(range(100, 200))
    found = scored_texts(num_texts=4, length=10, vocab_size=300, beginning=[2], text=text)
    assert found == [[2, *range(start, start + 10)] for start in (100, 125, 150, 175)]
    drawn = scored_texts(num_texts=3, length=10, vocab_size=300)
    assert drawn == scored_texts(num_texts=3, length=10, vocab_size=300)
    assert all(260 <= token < 300 for row in drawn for token in row)
    assert [len(row) for row in drawn] == [10] * 3


def test_each_mask_has_a_page_each_engine_a_reason_for_what_it_lacks_and_options_name_engine_setting_and_value() -> (
    None
):
    assert {"", *command.MASKS} == set(command.PAGES)
    names = [command._arguments([]).table.name, command._arguments(["--instructions", "avx2"]).json.name]
    assert names == ["RESULTS.md", "peers_avx2.json"]
    for engine in ENGINES.values():
        assert {*engine.files, *engine.lacks} >= {*PRECISIONS, PUBLISHED}, engine.name
    assert command.options_of("ours.engine.max_num_seqs=16") == ("ours", "engine.max_num_seqs", 16)
    assert command.options_of("vllm.load_format=dummy") == ("vllm", "load_format", "dummy")


def measured(monkeypatch: pytest.MonkeyPatch, start_s: float) -> tuple[list[tuple[object, ...]], rounds.Findings]:
    """Plan a quick run of two models whose groups are not measured; returns these and the findings."""
    groups: list[tuple[object, ...]] = []

    def note(phase: rounds.Phase, engines: list[Engine], *_: object) -> None:
        names = [workload.name for workload in phase.workloads]
        groups.append((phase.shape.name, phase.precision, [engine.name for engine in engines], names))

    monkeypatch.setattr(command, "open_ceilings", lambda settings: contextlib.nullcontext())
    monkeypatch.setattr(command, "measure_group", note)
    monkeypatch.setattr(command, "command_starts", lambda *_, **__: [])
    args = command._arguments(["--quick", "--precisions", "fp32", "int8"])
    engines = [ENGINES[name] for name in ("ours", "ours_again", "openvino")]
    findings = rounds.Findings()
    command._measure(args, engines, [TINY, SHAPES["gemma3-270m"]], Path(), start_s, findings)
    return groups, findings


def test_a_quick_run_has_every_workload_and_the_pair_of_equals_once(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, findings = measured(monkeypatch, time.monotonic())
    assert groups == [
        ("tiny", "fp32", ["ours", "ours_again", "openvino"], list(SHORT)),
        ("tiny", "int8", ["ours", "openvino"], list(SHORT)),
        ("gemma3-270m", PUBLISHED, ["ours"], ["single", "streams8"]),
    ]
    assert [(one["model"], one["engine"]) for one in findings.unavailable] == [("gemma3-270m", "openvino")]


def test_nothing_is_started_once_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, findings = measured(monkeypatch, time.monotonic() - command.QUICK_S)
    assert groups == []
    late = [one for one in findings.unavailable if one["reason"] == "no time was left to start it"]
    assert [(one["precision"], one["engine"]) for one in late] == [
        *(("fp32", name) for name in ("ours", "ours_again", "openvino")),
        *(("int8", name) for name in ("ours", "openvino")),
        (PUBLISHED, "ours"),
    ]


def test_engines_that_do_not_fit_together_are_measured_in_groups_with_ours_in_each() -> None:
    engines = list(ENGINES.values())
    assert [len(group) for group in command.groups_of(engines, SHAPES["llama-110m"], 64 * 2**30)] == [len(engines)]
    groups = command.groups_of(engines, SHAPES["qwen3-0.5b"], 30 * 2**30)
    assert all(group[:2] == engines[:2] for group in groups)
    assert [engine for group in groups for engine in group[2:]] == engines[2:]
    assert len(groups) > 1
    assert command.groups_of(engines[:2], TINY, 0) == [engines[:2]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--option", "ours.x"], "expected ENGINE.NAME=VALUE"),
        (["--option", "theirs.x=1"], "'theirs' is no engine; choose from ours"),
        (["--rounds", "0"], "'0' is not a whole number above 0"),
        (["--engines", "tgi"], "invalid choice: 'tgi'"),
        (["--model", "gpt"], "invalid choice: 'gpt'"),
    ],
)
def test_bad_input_is_refused_with_what_is_possible(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        command.main(arguments)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.nightly
def test_a_model_whose_maker_is_not_prepared_says_which(cache: Path) -> None:
    with pytest.raises(ModelError, match="the environment gguf that makes gguf files: not prepared"):
        files_of(TINY, "gguf", "int8", cache)


def test_half_a_model_is_not_taken_for_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="hf could not be made"):
        files_of(attrs.evolve(TINY, architecture="unheard"), "hf", "fp32", tmp_path)
    assert not list(tmp_path.glob("models/*/hf"))
