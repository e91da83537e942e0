from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from trencadis.cli import main
from trencadis.interfaces import BucketingStrategy
from trencadis.records import Bucket, BucketLimits, Phase, Shape, UnifiedBucket
from trencadis_gallery.bucketing.workloads.workload import read_source
from trencadis_plugins.bucketing.exponential import Exponential
from trencadis_plugins.bucketing.from_file import read_bucket_file
from trencadis_plugins.bucketing.linear import Linear
from trencadis_plugins.bucketing.padding_aware import PaddingAware
from trencadis_plugins.bucketing.unified import Unified
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:00:{second:02},{17 * second % 900 + 1},{7 * second % 31 + 1}\n" for second in range(60)
)
LISTED = "--bucketing.complete=false"
SMALL = ["--max-num-seqs=4", "--max-model-len=1024", "--max-num-batched-tokens=1024", "--num-device-blocks=5781"]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in ("TRENCADIS_CONFIG", "TRENCADIS_BLOCKED_PLUGINS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def trace(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text(TRACE)
    return str(file)


def as_json(capsys, *flags):
    assert main(["buckets", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def error(capsys, *flags):
    assert main(["buckets", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize("flags", [(LISTED,), ("--bucketing.on-miss=refuse",)])
def test_bucket_that_completes_a_table_can_be_left_out(capsys, flags):
    """The last chunk of a prompt may begin in the last block of a sequence, which no bucket of 2026 foresees."""
    listed = as_json(capsys, "--strategy=exponential", *flags, *SMALL)
    warmed = as_json(capsys, "--strategy=exponential", *SMALL)
    assert warmed["decode"] == listed["decode"]
    assert warmed["prompt"] == [*listed["prompt"], [1, 127, 8]]


class Named(BucketingStrategy):
    """A strategy that is made when its table is asked for, with an engine's limits."""

    def __init__(self, make: Callable[[BucketLimits], BucketingStrategy]) -> None:
        self._make = make

    def buckets(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        self._made = self._make(limits)
        return self._made.buckets(limits)

    def bucket_for(self, shape: Shape) -> Bucket:
        return self._made.bucket_for(shape)


STRATEGIES = {"exponential": Exponential, "linear": Linear, "padding_aware": PaddingAware, "unified": Unified}
LAYOUTS = {
    "padded": ({"layout": "padded", "max_prefill_batch_size": 2}, ("--max-num-prefill-seqs=2",)),
    "contiguous": ({"layout": "padded", "contiguous": True}, ("--contiguous", "--prefix-caching")),
    "merged": (
        {"layout": "padded", "max_prefill_batch_size": 3, "merges_prefills": True},
        ("--merged-prefill", "--max-num-prefill-seqs=3"),
    ),
    "unified": ({"layout": "unified"}, ("--unified",)),
}


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for layout in LAYOUTS for name in STRATEGIES if layout != "unified" or name == "unified"],
)
def test_buckets_shown_are_those_that_an_engine_warms(capsys, name, layout, complete):
    options, flags = LAYOUTS[layout]
    engine = make_engine(
        backend=FakeBackend(max_model_len=150, **options),
        bucketing=Named(STRATEGIES[name]),
        complete=complete,
        block_size=16,
        num_blocks=40,
        max_num_seqs=6,
        max_num_batched_tokens=64,
    )
    limits = ["--block-size=16", "--max-model-len=150", "--max-num-seqs=6", "--max-num-batched-tokens=64"]
    shown = as_json(
        capsys, f"--strategy={name}", *limits, "--num-device-blocks=40", *flags, *((), (LISTED,))[not complete]
    )
    unified = layout == "unified"
    warmed = [
        [one.query_len, one.num_blocks, one.num_unique_blocks, int(one.is_causal)]
        if isinstance(one, UnifiedBucket)
        else [one.batch_size, one.query_len, one.num_blocks]
        for phase in Phase
        for one in engine.warm_up.buckets
        if one.phase is phase
    ]
    assert (shown["unified"] if unified else shown["prompt"] + shown["decode"]) == warmed


def test_limits_come_from_the_configuration_if_no_flag_gives_them(capsys):
    configured = ["--engine.max-num-seqs=4", "--model.max-model-len=1024", "--cache.num-blocks=5781"]
    table = as_json(capsys, *configured, "--engine.max-num-batched-tokens=1024", "--cache.block-size=128")
    assert table == as_json(capsys, "--strategy=exponential", *SMALL)


@pytest.mark.representatives(4)
@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ((), "prefix_caching", True),
        (("--contiguous",), "prefix_caching", False),
        (("--contiguous", "--prefix-caching"), "prefix_caching", True),
        ((), "num_blocks", 256 * 64),
        ((), "max_prefill_batch_size", 1),
        (("--max-num-prefill-seqs=9", "--max-num-seqs=3"), "max_prefill_batch_size", 3),
        (("--num-speculative-tokens=2",), "max_draft_tokens", 2),
        ((), "max_draft_tokens", 0),
        (("--speculation.name=ngram", "--speculation.ngram.max-draft-tokens=7"), "max_draft_tokens", 7),
        (("--speculation.name=ngram",), "max_draft_tokens", 4),
        (("--speculation.name=ngram", "--num-speculative-tokens=1"), "max_draft_tokens", 1),
        (("--block-size=16",), "block_size", 16),
    ],
)
def test_every_limit_has_a_flag_and_a_stated_default(capsys, flags, key, value):
    assert as_json(capsys, "--compare=exact", *flags)["limits"][key] == value


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "there is nothing to merge. Raise --max-num-prefill-seqs."),
        (("--max-num-prefill-seqs=2", "--unified"), "goes with neither --unified"),
        (("--max-num-prefill-seqs=2", "--trace=x.csv"), "goes with neither --unified"),
    ],
)
def test_merged_prompts_that_cannot_be_meant_are_refused(capsys, flags, said):
    assert said in error(capsys, "--merged-prefill", *flags)


def test_rules_of_a_model_are_flags_of_the_strategy(capsys):
    rules = ["--bucketing.exponential.prompts.query-chunk=256", "--strategy=exponential"]
    assert {query for _, query, _ in as_json(capsys, *rules, LISTED, *SMALL)["prompt"]} == {256, 512, 768, 1024}
    said = error(capsys, *rules, *SMALL, "--max-num-batched-tokens=1000")
    assert (
        "[bucketing.exponential.prompts] query_chunk = 256 (from flag --bucketing.exponential.prompts.query-chunk)"
        in said
    )
    assert "engine.max_num_batched_tokens = 1000 is no multiple of it" in said
    assert "Set engine.max_num_batched_tokens to 1024." in said


def test_text_lists_every_bucket_and_a_summary(capsys):
    assert main(["buckets", "--strategy=exponential", *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["phase", "batch", "size", "query", "blocks"]
    assert lines[1].split() == ["prefill", "1", "128", "0"]
    assert lines[36].split() == ["prefill", "1", "127", "8"]
    assert lines[49].split() == ["decode", "4", "1", "32"]
    assert lines[-1].split()[:4] == ["exponential", "36", "13", "19.6"]


UNIFIED = [
    "--unified",
    "--max-num-seqs=32",
    "--max-model-len=1024",
    "--max-num-batched-tokens=2048",
    "--num-device-blocks=5781",
]


def test_unified_table_has_four_sizes(capsys):
    table = as_json(capsys, *UNIFIED, "--bucketing.unified.form=alpha")["unified"]
    vendor = {(8, 0, 0, 1), (8, 0, 8, 0), (2048, 256, 2890, 1), (2048, 256, 5781, 1)}
    assert vendor <= {tuple(sizes) for sizes in table}
    assert len(table) == 375
    assert main(["buckets", *UNIFIED, "--bucketing.unified.form=alpha"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["phase", "query", "shared", "blocks", "unique", "blocks", "causal"]
    assert lines[1].split() == ["prefill", "8", "0", "0", "1"]
    assert lines[-1].split()[0] == "unified"


def test_trace_adds_padding_to_the_table(capsys, trace):
    report = as_json(capsys, "--strategy=exponential", "--trace", trace, *SMALL)["report"]
    assert report["num_buckets"] == 49
    assert 0 < report["prompt_padding"] < 1
    assert report["num_unprepared"] == 0
    exact = as_json(capsys, "--strategy=exact", "--trace", trace, *SMALL)["report"]
    assert (exact["prompt_padding"], exact["decode_padding"], exact["time_padding"]) == (0.0, 0.0, 0.0)


def test_strategies_stand_side_by_side(capsys, trace):
    assert main(["buckets", "--compare", "exponential,linear,fitted", "--trace", trace, *SMALL]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    for name in ("strategy", "prompt", "decode", "warm-up s", "graph GiB", "prompt_padding", "decode_padding"):
        assert name in head
    assert [row.split()[0] for row in rows] == ["exponential", "linear", "fitted"]
    compared = as_json(capsys, "--compare", "exponential,linear,fitted", "--trace", trace, *SMALL)["strategies"]
    assert compared["fitted"]["report"]["time_padding"] < compared["exponential"]["report"]["time_padding"]
    assert compared["exponential"]["prompt"] == as_json(capsys, "--strategy=exponential", *SMALL)["prompt"]


def test_constants_of_the_estimates_are_configured(capsys):
    flags = ["--strategy=exponential", "--compare=exponential", *SMALL][1:]
    usual = as_json(capsys, *flags)["strategies"]["exponential"]["report"]
    slow = as_json(capsys, *flags, "--bucketing.fitted.cost.compile_s=4")["strategies"]["exponential"]["report"]
    assert (usual["warmup_s"], slow["warmup_s"]) == (pytest.approx(19.6), pytest.approx(196.0))


def test_fit_writes_a_bucket_file_within_its_budget(capsys, trace, tmp_path):
    file = tmp_path / "buckets.txt"
    assert main(["buckets", "fit", "--trace", trace, "--max-graphs", "8", "-o", str(file), *SMALL]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "fitted"
    table = as_json(capsys, "--strategy=fitted", "--max-graphs=8", "--trace", trace, *SMALL)
    buckets = read_bucket_file(file, strict=True)
    assert len(buckets) == 8
    assert [[item.batch_size, item.query_len, item.num_blocks] for item in buckets] == table["prompt"] + table["decode"]
    assert "strategy fitted, from trace.csv" in file.read_text().splitlines()[0]


def test_written_table_is_read_by_from_file(capsys, trace, tmp_path):
    file = tmp_path / "buckets.txt"
    assert main(["buckets", "fit", "--trace", trace, "-o", str(file), *SMALL]) == 0
    capsys.readouterr()
    fitted = as_json(capsys, "--strategy=fitted", "--trace", trace, *SMALL)
    listed = as_json(capsys, "--strategy=from_file", "--bucketing.from_file.path", str(file), *SMALL)
    assert {key: fitted[key] for key in listed} == listed


def test_shapes_of_the_trace_are_written_and_serve_as_a_trace(capsys, trace, tmp_path):
    shapes = str(tmp_path / "shapes.csv")
    flags = ["--strategy=exponential", *SMALL]
    first = as_json(capsys, "--trace", trace, "--shapes", shapes, *flags)
    assert read_source(Path(shapes)).recorded
    assert as_json(capsys, "--trace", shapes, *flags) == first


@pytest.mark.slow
def test_picture_is_drawn(capsys, trace, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install trencadis[plot]")
    file = tmp_path / "buckets.png"
    assert main(["buckets", "--compare=exponential,fitted", "--trace", trace, "--plot", str(file), *SMALL]) == 0
    assert file.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.representatives(6)
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--strategy=a", "--compare=b"], "--strategy and --compare exclude each other"),
        (["fit"], "fit needs --trace"),
        (["--shapes=s.csv"], "--shapes needs --trace"),
        (["fit", "--trace=t", "--compare=a,b"], "--compare writes no table"),
        (["--compare=,"], "names no strategy"),
        (["--strategy=exponentail"], 'Did you mean "exponential"?'),
        (["--strategy=linear", "--generation=2025-07"], "flag --generation: linear has no option generation"),
        (["--strategy=exponential", "--generation=2024"], "must be one of: 2026-08, 2025-07"),
        (["--strategy=fitted"], "there is nothing to learn from"),
        (["--max-num-seqs=0"], "'0' is no whole number of at least 1"),
        (["--num-speculative-tokens=-1"], "'-1' is no whole number of at least 0"),
        (["--trace=nope.csv"], "nope.csv: no such trace file"),
        (["--strategy=exponential", "-o", "/nowhere/at/all.txt"], "/nowhere/at/all.txt: cannot be written"),
        (["--block-size=1", "--max-num-batched-tokens=1", "-o", "never.txt"], "this table has no bucket file"),
        (["merge"], "invalid choice"),
        (["--unified", "--strategy=linear"], "linear has no table for unified passes"),
        (["--unified", "--trace=t"], "--unified goes with no trace"),
    ],
)
def test_what_cannot_be_meant_ends_with_words_and_exit_code_2(capsys, flags, said):
    assert said in error(capsys, *flags)
