"""What the tools' files, objectives and commands must not say, each refusal whole. A line of the file: reader, content, message."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trencadis.cli import main
from trencadis.errors import TrencadisError
from trencadis.text import load_tokenizer
from trencadis_gallery.bucketing.workloads.trace import parse_trace
from trencadis_gallery.bucketing.workloads.workload import read_source
from trencadis_tools.bench import read_prompts
from trencadis_tools.bench.block_trace import parse_block_trace
from trencadis_tools.lock import read_lock
from trencadis_tools.simulation import load_drafts
from trencadis_tools.simulation.measured_requests import read_measured
from trencadis_tools.simulation.step_times import load_step_times, parse_sheet, read_records
from trencadis_tools.tune.slo import parse_slo
from trencadis_tools.workloads import load_workload
from trencadis_tools.workloads.traces import TraceSource, read_trace

REFUSALS = [json.loads(line) for line in Path(__file__).with_name("refusals.jsonl").read_text("utf-8").splitlines()]
LOAD = "num_requests = 8\n[arrivals]\nrate = 2.0\n[lengths]\nprompt = 20\noutput = 5\n"
ROW = {"num_prompt_tokens": 20, "num_output_tokens": 3, "ttft_s": 0.5, "tpot_s": 0.25}
TRACE = ["TIMESTAMP,ContextTokens,GeneratedTokens", *(f"2023-11-16 18:15:{second:02},9,5" for second in range(20))]
BLOCKS = {"timestamp": 0, "input_length": 1000, "output_length": 2, "hash_ids": [1, 2]}
BESIDE = {
    "load.toml": LOAD,
    "narrow.toml": "[engine]\nmax_num_batched_tokens = 32\n",
    "same.toml": "[engine]\nmax_num_batched_tokens = 32\n",
    "wide.toml": "[engine]\nmax_num_batched_tokens = 2048\n",
    "trace.csv": "\n".join(TRACE),
    "blocks.jsonl": json.dumps(BLOCKS),
    "made.jsonl": "\n".join(json.dumps({"arrival_s": index, **ROW}) for index in range(80)),
}


def of_file(name: str, read: Callable[[Path], Any]) -> Callable[[str], Any]:
    def refuse(text: str) -> Any:
        Path(name).write_text(text)
        return read(Path(name))

    return refuse


def of_trace(content: dict[str, Any]) -> Any:
    """Read rows of a trace, with keys of ``[trace]`` beside them."""
    rows = content.pop("rows")
    Path("trace").write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
    return read_trace(TraceSource(file="trace", **content))


READERS: dict[str, Callable[[Any], Any]] = {
    "block trace": lambda text: parse_block_trace(text, "t"),
    "drafts": of_file("drafts.toml", lambda path: load_drafts(str(path))),
    "drafts of a flag": load_drafts,
    "lengths": lambda text: parse_trace(text, "a"),
    "lock": of_file("x.lock", read_lock),
    "objectives": parse_slo,
    "prompts": of_file("prompts.jsonl", lambda path: read_prompts(path, load_tokenizer("demo"))),
    "requests": of_file("requests.jsonl", read_measured),
    "shapes": of_file("s.csv", read_source),
    "sheet": lambda text: parse_sheet(text, "own.toml"),
    "step times": of_file("times.json", load_step_times),
    "step times by name": load_step_times,
    "steps": of_file("steps.jsonl", read_records),
    "trace": of_trace,
    "workload": of_file("mine.toml", lambda path: load_workload(str(path))),
    "written workload": of_file("w.jsonl", lambda path: load_workload(str(path))),
}


def refusal(reader: str, content: Any, capsys: pytest.CaptureFixture[str]) -> str:
    for name, text in BESIDE.items():
        Path(name).write_text(text)
    if reader == "command":
        assert main(content) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        return printed.err.strip()
    with pytest.raises(TrencadisError) as caught:
        READERS[reader](content)
    return str(caught.value)


@pytest.mark.parametrize("reader", sorted({*READERS, "command"}))
@pytest.mark.representatives(len(READERS) + 1)
def test_what_makes_no_sense_is_refused_in_words(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRENCADIS_LOG__LEVEL", "warning")
    expected = [(content, message) for one, content, message in REFUSALS if one == reader]
    assert expected
    assert [(content, refusal(reader, json.loads(json.dumps(content)), capsys)) for content, _ in expected] == expected
