"""What an operator who gets a Gaudi's settings wrong is told: the value, who set it, and the remedy; never a traceback."""

from __future__ import annotations

import logging
import sys

import pytest

from support.backends import tiny_models
from trencadis.cli import main

GAUDI = ["--backend.name=gaudi", "--engine.max-num-seqs=2", "--engine.max-num-batched-tokens=64"]
EMULATED = [*GAUDI, "--backend.gaudi.device=emulated", "--model.max-model-len=64"]
BUCKETS = ["--bucketing.complete=false", "--max-num-seqs=4", "--max-model-len=1024", "--max-num-batched-tokens=1024"]


def said(capsys, *arguments):
    """Run a command that must fail, and return its message."""
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    message = captured.err[captured.err.rindex("error: ") :].strip()
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("memory-utilization", "1.5", "must be > 0 and <= 1."),
        ("memory-utilization", "0", "must be > 0 and <= 1."),
        ("memory-utilization", "most", "must be a number."),
        ("graph-reserve", "1", "must be >= 0 and < 1."),
        ("prompt-ratio", "-0.1", "must be >= 0 and <= 1."),
        ("max-prefill-batch-size", "0", "must be >= 1."),
        ("mode", "fast", "must be one of: auto, compile, lazy, eager."),
    ],
)
def test_value_out_of_range_is_named_with_its_source_and_its_range(capsys, setting, value, reason):
    message = said(capsys, "warmup", *EMULATED, f"--backend.gaudi.{setting}={value}")
    assert message.startswith(f"error: [backend.gaudi] {setting.replace('-', '_')} = ")
    assert f"(from flag --backend.gaudi.{setting}): {reason}" in message


@pytest.mark.parametrize(
    ("flags", "value", "remedy"),
    [
        (
            ["mode=compile", "capture=budgeted"],
            'capture = "budgeted"',
            'Set mode = "lazy", or capture = "capture_all".',
        ),
        (["mode=eager", "defragmenter-graphs=on"], 'defragmenter_graphs = "on"', "or choose another mode."),
        (["recipe-cache=here"], 'recipe_cache = "here"', 'Such as "/var/cache/recipes,false,2048".'),
        (["layout=unified", "contiguous=true"], 'layout = "unified"', "Leave both out"),
        (["merged-prefill=true"], "merged_prefill = true", "Raise max_prefill_batch_size."),
    ],
)
def test_settings_that_contradict_each_other_are_named_with_source_and_remedy(capsys, flags, value, remedy):
    message = said(capsys, "warmup", *EMULATED, *(f"--backend.gaudi.{flag}" for flag in flags))
    key = value.split()[0].replace("_", "-")
    assert message.startswith(f"error: [backend.gaudi] {value} (from flag --backend.gaudi.{key})")
    assert message.endswith(remedy) or remedy in message


def test_missing_software_is_named_with_both_remedies(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "habana_frameworks", None)
    for name in ("PT_HPU_LAZY_MODE", "PT_HPU_WEIGHT_SHARING"):
        monkeypatch.delenv(name, raising=False)
    message = said(capsys, "warmup", *GAUDI, "--backend.gaudi.device=hpu")
    assert 'device = "hpu" needs the Gaudi software' in message
    assert 'Install habana-torch-plugin from the Gaudi software suite, or set device = "emulated".' in message


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return f"--model.path={tiny_models.save_model('llama', tmp_path_factory.mktemp('models'))}"


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--cache.block-size=64"], ["[cache] block_size = 64", "16, 128, 528, 768", "Leave it at 0 for 128."]),
        (
            ["--backend.gaudi.emulated-memory-bytes=1000"],
            ["emulated_memory_bytes = 1000: weights needs ", "1000 are free", "Raise it"],
        ),
        (
            # the weights leave room, the cache has a block's less than one
            ["--backend.gaudi.emulated-memory-bytes=400000", "--backend.gaudi.graph-reserve=0.99"],
            ["do not pay for one block of ", "VLLM_GRAPH_RESERVED_MEM=0.99", "lower backend.gaudi.graph_reserve"],
        ),
        (
            ["--cache.num-blocks=1", "--cache.block-size=16"],
            ["[model] max_model_len = 64", "1 blocks holds 16 tokens", "raise"],
        ),
    ],
)
def test_device_that_cannot_serve_says_what_to_change(capsys, tiny, flags, parts):
    message = said(capsys, "warmup", *EMULATED, tiny, *flags)
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize(
    ("text", "reason", "remedy"),
    [
        (None, "No such file or directory", "Give a text file with one bucket a line."),
        ("", "no prefill bucket: it lists none", 'or set phases = "decode"'),
        ("(1, 128, 0)\n", "no decode bucket: it lists none", 'or set phases = "prefill"'),
        ("(1, 99999, 0)\n(1, 1, 4)\n", "none of its 1 is within the engine's limits", "Add a line"),
        ("hello\n", "no prefill bucket: it lists none", "Add a line"),
        ("\ufeff\x00\ud800", "it is no text", "Give a text file"),
    ],
)
def test_bad_bucket_file_is_named_with_its_variable_reason_and_remedy(
    capsys, monkeypatch, tmp_path, text, reason, remedy
):
    file = tmp_path / "buckets.txt"
    if text is not None:
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
    monkeypatch.setenv("VLLM_BUCKETING_FROM_FILE", str(file))
    message = said(capsys, "buckets", *BUCKETS)
    assert message.startswith(
        f'error: [bucketing.from_file] path = "{file}" (from environment VLLM_BUCKETING_FROM_FILE): '
    )
    assert reason in message
    assert remedy in message


def test_bad_lines_are_named_one_by_one_and_the_others_are_used(capsys, caplog, tmp_path):
    file = tmp_path / "buckets.txt"
    file.write_text("(1, 128, 0)\nhello\n(1, 1, 4)\n(1, 1)\n")
    assert main(["buckets", "--strategy=from_file", f"--bucketing.from_file.path={file}", "--json", *BUCKETS]) == 0
    assert capsys.readouterr().out == '{"prompt": [[1, 128, 0]], "decode": [[1, 1, 4]]}\n'
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [message.partition(" in ")[0] for message in warnings] == [
        "Skipping invalid bucketing line 2",
        "Skipping invalid bucketing line 4",
    ]
    assert "at 'hello'" in warnings[0]
    assert "2 values, but a bucket has three" in warnings[1]


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (
            ["--strategy=linear", "--bucketing.linear.decode-bs-min=9"],
            [
                "[bucketing.linear] decode_bs_min = 9 (from flag --bucketing.linear.decode-bs-min)",
                "Lower decode_bs_min",
            ],
        ),
        (
            ["--strategy=linear", "--bucketing.linear.prompt-query-min=2000", "--max-num-batched-tokens=8192"],
            ["[bucketing.linear] leaves no prefill bucket", "model.max_model_len = 1024", "Lower the smallest sizes"],
        ),
        (
            ["--strategy=fitted", "--max-graphs=1", "--trace=TRACE"],
            ["[bucketing.fitted] max_graphs = 1", "the 2 largest buckets", "Raise the budget"],
        ),
        (["--strategy=from_file"], ["[bucketing.from_file] path: not set", "--bucketing.from_file.path"]),
        (["--strategy=linnear"], ['[bucketing] name = "linnear" (from flag --strategy)', 'Did you mean "linear"?']),
    ],
)
def test_limits_that_yield_no_bucket_are_named_with_the_setting_to_change(capsys, tmp_path, flags, parts):
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2026-08-01 09:00:00.120,374,44\n")
    message = said(capsys, "buckets", *BUCKETS, *(flag.replace("TRACE", str(trace)) for flag in flags))
    assert [part for part in parts if part not in message] == []
