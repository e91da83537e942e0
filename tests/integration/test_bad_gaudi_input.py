"""What an operator who gets a Gaudi's settings wrong is told: the value, who set it, and the remedy; never a traceback.

``gaudi_messages.jsonl`` has a command that must fail a line, the text of its bucket file if it has one, and what is said, whole.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest

from support.backends import tiny_models
from trencadis.cli import main

MESSAGES = [json.loads(line) for line in Path(__file__).with_name("gaudi_messages.jsonl").read_text().splitlines()]
GAUDI = ["--backend.name=gaudi", "--engine.max-num-seqs=2", "--engine.max-num-batched-tokens=64"]
GIVEN = {
    "warmup": [*GAUDI, "--backend.gaudi.device=emulated", "--model.max-model-len=64"],
    "buckets": [
        "--bucketing.complete=false",
        "--max-num-seqs=4",
        "--max-model-len=1024",
        "--max-num-batched-tokens=1024",
    ],
}


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must fail, and return its message."""
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err[captured.err.rindex("error: ") :].strip().removeprefix("error: ")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths by the words that stand for them."""
    folder = tmp_path_factory.mktemp("places")
    (folder / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2026-08-01 09:00:00.120,374,44\n")
    model = tiny_models.save_model("llama", folder)
    return {"<TRACE>": str(folder / "trace.csv"), "<MODEL>": str(model), "<FILE>": str(folder / "buckets.txt")}


@pytest.mark.representatives(4, ci=len(MESSAGES))
@pytest.mark.parametrize("row", MESSAGES, ids=lambda row: row["command"])
def test_a_bad_setting_is_named_with_its_source_and_a_remedy(
    row: dict[str, str], places: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command, *flags = row["command"].split()
    if "file" in row:
        monkeypatch.setenv("VLLM_BUCKETING_FROM_FILE", places["<FILE>"])
        Path(places["<FILE>"]).unlink(missing_ok=True)
        if row["file"] is not None:
            Path(places["<FILE>"]).write_bytes(row["file"].encode("utf-8", "surrogatepass"))
    expected = row["says"]
    for word, path in places.items():
        flags = [flag.replace(word, path) for flag in flags]
        expected = expected.replace(word, path)
    assert said(capsys, command, *GIVEN[command], *flags) == expected


def test_missing_software_is_named_with_both_remedies(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "habana_frameworks", None)
    for name in ("PT_HPU_LAZY_MODE", "PT_HPU_WEIGHT_SHARING"):
        monkeypatch.delenv(name, raising=False)
    message = said(capsys, "warmup", *GAUDI, "--backend.gaudi.device=hpu")
    assert 'device = "hpu" needs the Gaudi software' in message
    assert 'Install habana-torch-plugin from the Gaudi software suite, or set device = "emulated".' in message


def test_bad_lines_are_named_one_by_one_and_the_others_are_used(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    file = tmp_path / "buckets.txt"
    file.write_text("(1, 128, 0)\nhello\n(1, 1, 4)\n(1, 1)\n")
    flags = ["--strategy=from_file", f"--bucketing.from_file.path={file}", "--json"]
    assert main(["buckets", *flags, *GIVEN["buckets"]]) == 0
    assert capsys.readouterr().out == '{"prompt": [[1, 128, 0]], "decode": [[1, 1, 4]]}\n'
    first, second = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert first.startswith("Skipping invalid bucketing line 2 in ")
    assert "at 'hello'" in first
    assert second.startswith("Skipping invalid bucketing line 4 in ")
    assert "2 values, but a bucket has three" in second
