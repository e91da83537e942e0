"""The command on the real simulator, with short workloads; and what it says of arguments that make no sense."""

from __future__ import annotations

import csv
import json
import re
import types
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import attrs
import pytest

from trencadis.cli import main
from trencadis_tools import lab
from trencadis_tools.commands import compare as compare_command
from trencadis_tools.compare import candidates
from trencadis_tools.compare.candidates import candidates_of, restored, sweep_points
from trencadis_tools.compare.comparison import arguments_from, candidates_in
from trencadis_tools.compare.record import write_record

WORKLOAD = """
num_requests = 8
[arrivals]
rate = 2.0
[lengths]
prompt = { kind = "uniform", min = 10, max = 200 }
output = { kind = "uniform", min = 2, max = 12 }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a workload and two configurations: few tokens in a step, or many."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRENCADIS_LOG__LEVEL", "warning")
    Path("load.toml").write_text(WORKLOAD)
    for name, num in (("narrow", 32), ("wide", 2048)):
        Path(f"{name}.toml").write_text(f'[engine]\nmax_num_batched_tokens = {num}\n[scheduling]\nname = "fcfs"\n')
    return tmp_path


@pytest.fixture
def compare(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*words: str, workload: str | None = "load.toml") -> tuple[int, str, str]:
        code = main(["compare", *words, *(["--workload", workload] if workload else [])])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


class Page(HTMLParser):
    """What a page holds: its elements by name, and addresses that it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: dict[str, list[dict[str, str | None]]] = {}
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.elements.setdefault(tag, []).append(given)
        address = given.get("src") or given.get("href") or given.get("xlink:href") or "#"
        if not address.startswith("#") or tag in ("script", "link"):
            self.loads.append(address)


def test_draft_lengths_are_compared_on_the_same_drafts_which_the_record_names(compare, folder) -> None:
    for name, most in (("one", 1), ("four", 4)):
        Path(f"{name}.toml").write_text(
            f'[speculation]\nname = "ngram"\n[speculation.ngram]\nmax_draft_tokens = {most}\n'
        )
    words = ["one.toml", "four.toml", "--seeds", "3", "--metric", "tpot_mean", "--no-sensitivity", "--json", "r.json"]
    code, _, err = compare(*words)
    assert (code, "--drafts 0.7" in err) == (2, True)
    code, out, _ = compare(*words, "--drafts", "0.8")
    assert code == 0
    assert "four is better" in out
    compared = json.loads(Path("r.json").read_text())["comparison"]
    assert compared["arguments"]["drafts"] == "0.8"
    assert "acceptance=0.8" in compared["step_times"]
    assert compare("--verify", "r.json", workload=None)[:2] == (0, "r.json: the same bytes.\n")


def test_a_comparison_from_the_table_to_the_record_that_gives_the_same_bytes(compare, folder) -> None:
    words = ["narrow.toml", "wide.toml", "--seeds", "3", "--metric", "ttft_mean,preemptions", "--json", "r.json"]
    code, out, err = compare(*words, "--out", "r.html", "--requests", "r.csv")
    assert (code, "One seed" in err) == (0, False)
    table = out.splitlines()
    assert table[0].split()[:4] == ["metric", "narrow", "wide", "effect"]
    assert table[1].endswith("better: wide")
    assert "ttft_mean: wide is better. It is " in out
    assert "preemptions: equal within 2 %." in out

    record = json.loads(Path("r.json").read_text())
    point = record["comparison"]["points"][0]
    assert [workload["seed"] for workload in point["workloads"]] == [0, 1, 2]
    assert len({workload["digest"] for workload in point["workloads"]}) == 3
    assert [len(outcome["plan_hash"]) for outcome in point["outcomes"]] == [32, 32]
    assert point["effects"][0]["verdict"] == "better"
    assert point["effects"][0]["interval"]["high"] < 0
    assert "LinearStepTimes" in record["comparison"]["step_times"]

    rows = list(csv.DictReader(Path("r.csv").read_text().splitlines()))
    assert len(rows) == 2 * 3 * 8
    mean = sum(float(row["ttft_s"]) for row in rows if row["config"] == "wide") / 24
    assert mean == pytest.approx(point["outcomes"][1]["values"]["ttft_mean"], rel=0.3)  # the warm-up is in the file

    text = Path("r.html").read_text()
    page = Page(text)
    assert page.loads == []
    assert page.elements["html"] == [{"lang": "en"}]
    assert all(head.get("scope") == "col" for head in page.elements["th"])
    assert len(page.elements["figure"]) == len(page.elements["figcaption"]) >= 2
    for svg in text.split("<svg ")[1:]:
        ET.fromstring(f"<svg {svg.split('</svg>')[0]}</svg>")  # well-formed
    headings = [part.split("</h2>")[0] for part in text.split("<h2>")[1:]]
    assert headings[:3] == ["Verdict", "Who is who", "In numbers"]
    assert text.index("ttft_mean: wide is better.") < text.index("<table>")
    assert "<td>narrow</td><td>baseline</td><td>engine.max_num_batched_tokens = 32</td>" in text
    assert "<td>wide</td><td>candidate</td><td>engine.max_num_batched_tokens = 2048</td>" in text
    assert "; scheduling.name = fcfs. Everything else is at its default." in text
    assert "step times: the default, an RTX 4090 with Llama 3.1 8B: 16.9 ms a step, 90 µs a token" in text
    assert "narrow: 0 %" in text
    assert not re.search(r"StepTimes|DraftFacts|=\(|\[&#x27;|None|True|False", text)
    assert "trencadis compare narrow.toml wide.toml --workload load.toml --replicas 1 --seeds 3" in text
    assert point["outcomes"][0]["plan_hash"] in text
    assert point["workloads"][0]["digest"] in text

    Path("narrow.toml").write_text("[engine]\nmax_num_batched_tokens = 40\n")  # the record holds what was set
    assert compare("--verify", "r.json", workload=None)[:2] == (0, "r.json: the same bytes.\n")
    point["outcomes"][0]["plan_hash"] = "0" * 32  # a line of a plugin was other then
    Path("r.json").write_text(json.dumps(record))
    code, out, _ = compare("--verify", "r.json", workload=None)
    assert (code, out) == (0, "r.json: the same numbers. The hashes of plans differ: code has changed since.\n")


def test_a_record_of_other_code_runs_only_if_it_is_trusted_and_other_bytes_are_said_where(
    compare, folder, monkeypatch
) -> None:
    compare("narrow.toml", "wide.toml", "--seeds", "2", "--metric", "e2e_mean", "--no-sensitivity", "--json", "r.json")
    record = json.loads(Path("r.json").read_text())
    runs = []
    monkeypatch.setattr(compare_command, "compare", lambda *_, **__: runs.append(1))

    def refusal(changed: dict) -> str:
        Path("r.json").write_text(json.dumps(changed))
        code, out, err = compare("--verify", "r.json", workload=None)
        assert (code, out, runs) == (2, "", [])
        assert "add --trust" in err
        return err

    files = record["locks"]["narrow"]["files"]
    file = next(name for name in files if name.startswith("trencadis_plugins/scheduling/"))
    files[file], digest = "0" * 64, files[file]
    assert f"narrow: the file {file} is sha256" in refusal(record)
    files[file] = digest
    record["locks"]["wide"]["components"]["scheduling.name"]["component"] = "other"
    assert 'wide: scheduling.name is "fcfs" of the plugin "scheduling", locked "other"' in refusal(record)
    del record["locks"]["wide"]
    assert "wide: the record holds no lock of it" in refusal(record)

    monkeypatch.undo()
    monkeypatch.chdir(folder)
    assert compare("--verify", "r.json", "--trust", workload=None)[:2] == (0, "r.json: the same bytes.\n")
    Path("load.toml").write_text(WORKLOAD.replace("max = 12", "max = 13"))
    code, out, _ = compare("--verify", "r.json", "--trust", workload=None)
    assert code == 1
    assert out.startswith("r.json: not the same.")
    assert "points[0].workloads[0].digest: " in out
    assert "points[0].outcomes[0].values.e2e_mean: " in out


def test_a_policy_that_was_changed_since_is_named(compare, folder, monkeypatch) -> None:
    monkeypatch.syspath_prepend(folder)
    text = "from trencadis.interfaces import SchedulingPolicy\n\n\nclass Mine(SchedulingPolicy):\n    pass\n"
    Path("own_policy.py").write_text(text)
    Path("mine.toml").write_text('[scheduling]\nname = "own_policy:Mine"\n')
    terms = ["--seeds", "2", "--metric", "e2e_mean", "--no-sensitivity", "--max-requests", "4", "--json", "r.json"]
    assert compare("fcfs", "mine.toml", *terms)[0] == 0
    lock = json.loads(Path("r.json").read_text())["locks"]["mine"]
    assert len(lock["files"]["own_policy.py"]) == 64
    record = json.loads(Path("r.json").read_text())
    record["comparison"]["points"][0]["rate"] = 1.0
    record["locks"]["mine"]["files"]["own_policy.py"] = "0" * 64
    Path("r.json").write_text(json.dumps(record))
    code, _, err = compare("--verify", "r.json", workload=None)
    assert code == 2
    assert err.startswith(
        'error: r.json: [scheduling] name = "own_policy:Mine" (from argument): it would import own_policy'
    )
    assert "add --trust" in err
    code, out, _ = compare("--verify", "r.json", "--trust", workload=None)
    assert code == 1
    assert "points[0].rate: 1.0 in the record, 0.0 now" in out
    assert "mine: the file own_policy.py is sha256" in out


def test_code_that_a_record_names_is_not_imported(compare, folder) -> None:
    for given, sweep in (
        ({"scheduling.name": "os:system"}, []),
        ({"scheduling.fair_share.inner": "os:system"}, []),
        ({"scheduling.shortest_first.predictor": "os:system"}, []),
        ({"scheduling": {"name": "os:system", "options": {"command": "true"}}}, []),
        ({}, ["scheduling.name=fcfs,os:system"]),
    ):
        configs = [["one", given], ["two", {"engine.seed": 3}]]
        terms = {"configs": configs, "workload": "poisson", "sweep": sweep, "max_requests": 3, "metrics": ["e2e_mean"]}
        written = attrs.evolve(arguments_from(terms), configs=[("one", {}), configs[1]])
        record = {"format": "trencadis comparison 1", "comparison": {"arguments": terms, "points": []}}
        write_record(Path("r.json"), record, candidates_in(written))
        code, _, err = compare("--verify", "r.json", workload=None)
        assert code == 2
        assert "it would import os and call system" in err


def test_rates_and_swept_settings_are_points_with_lines_over_them(compare) -> None:
    words = ["fcfs", "shortest_first", "--seeds", "1", "--metric", "ttft_mean", "--no-sensitivity"]
    words += [
        "--max-requests",
        "12",
        "--rates",
        "2,8",
        "--sweep",
        "engine.max_num_seqs=4",
        "--out",
        "r.html",
        "--json",
        "r.json",
    ]
    code, out, err = compare(*words)
    assert code == 0, err
    assert "One seed: requests were drawn from seed 0 alone; others give other numbers. Take more with --seeds." in err
    points = json.loads(Path("r.json").read_text())["comparison"]["points"]
    settings = [(point["rate"], point["swept"]) for point in points]
    assert settings == [(rate, {"engine.max_num_seqs": value}) for value in ("4",) for rate in (2.0, 8.0)]
    assert len({point["outcomes"][0]["plan_hash"] for point in points}) == 1
    assert "At rate 8, engine.max_num_seqs = 4:" in out
    text = Path("r.html").read_text()
    assert "<figcaption>ttft_mean over rate, requests/s, engine.max_num_seqs = 4</figcaption>" in text


@pytest.mark.nightly
def test_one_trace_is_compared_by_blocks_of_its_requests(compare, folder) -> None:
    lines = [
        json.dumps({"timestamp": 400 * i, "input_length": 20 + i % 7, "output_length": 2 + i % 3, "hash_ids": []})
        for i in range(1100)
    ]
    Path("trace.jsonl").write_text("\n".join(lines))
    words = ["narrow.toml", "wide.toml", "--metric", "ttft_mean", "--no-sensitivity"]
    code, out, err = compare(*words, workload="trace.jsonl")
    assert code == 0, err
    assert "ttft_mean: " in out


def test_without_scipy_or_matplotlib_the_extra_is_named(compare, monkeypatch) -> None:
    def missing(name: str):
        raise ImportError(name)

    monkeypatch.setattr(lab, "importlib", types.SimpleNamespace(import_module=missing))
    for flag, package in ((["--out", "r.html"], "matplotlib"), (["--max-requests", "5", "--seeds", "1"], "scipy")):
        code, _, err = compare("narrow.toml", "wide.toml", *flag)
        assert code == 2
        assert f'needs {package}, which is not installed. Run pip install "trencadis[lab]".' in err


def test_parquet_holds_what_the_csv_holds(compare) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    compare("narrow.toml", "wide.toml", "--seeds", "1", "--no-sensitivity", "--requests", "r.parquet")
    table = parquet.read_table("r.parquet")
    assert table.num_rows == 2 * 8
    assert "ttft_s" in table.column_names


def test_a_configuration_is_restored_from_what_was_set(folder, monkeypatch) -> None:
    Path("mine.toml").write_text(
        '[scheduling]\nname = "trencadis_testing.engines:ServeInOrder"\n[engine]\nmax_num_seqs = 3\n[plugins]\nblocked = ["x"]\n'
    )
    monkeypatch.setenv("TRENCADIS_CACHE__BLOCK_SIZE", "8")
    base, mine = candidates_of(["shortest_first", "mine.toml"], overrides={"engine.seed": 5})
    monkeypatch.delenv("TRENCADIS_CACHE__BLOCK_SIZE")
    for one in (base, mine):
        again = restored(one.name, json.loads(json.dumps(one.given)), may_import=True)
        assert again.config == one.config
        assert again.plan_hash == one.plan_hash
    assert mine.given["cache.block_size"] == 8
    swept = restored("mine", mine.given, {"engine.max_num_seqs": "9"}, may_import=True)
    assert (swept.config.engine.max_num_seqs, swept.config.engine.seed) == (9, 5)


def test_secrets_stay_out_of_a_record(folder) -> None:
    Path("secret.toml").write_text(
        '[cache]\nkey = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"\n'
    )
    (secret, _) = candidates_of(["secret.toml", "narrow.toml"])
    assert "cache.key" not in secret.given


def test_swept_settings_are_combined() -> None:
    assert sweep_points([]) == [{}]
    assert sweep_points(["a.b=1,2", "c.d-e=x"]) == [{"a.b": "1", "c.d_e": "x"}, {"a.b": "2", "c.d_e": "x"}]
    assert candidates.sweep_points(["--a.b= 1 , 2 "]) == [{"a.b": "1"}, {"a.b": "2"}]
