"""The environment of a deployment of the vLLM plugin for Gaudi means the same here, and is named as the source."""

from __future__ import annotations

import json
import logging

import pytest

from trencadis.cli import main
from trencadis.config import load_config
from trencadis.config.aliases import aliases_of
from trencadis.errors import ConfigValueError
from trencadis.registry import Registry, load_with_plugins

STEPPED = "bucketing.linear", "bucketing.padding_aware"
DIMENSIONS = {
    "PROMPT_BS": "prompt_bs",
    "PROMPT_QUERY": "prompt_query",
    "PROMPT_SEQ": "prompt_query",
    "PROMPT_CTX": "prompt_ctx",
    "DECODE_BS": "decode_bs",
    "DECODE_BLOCK": "decode_block",
}
PARTS = [
    *((f"BUCKET_{bound}", bound, table) for bound in ("MIN", "STEP", "MAX") for table in STEPPED),
    *((f"BUCKET_{bound}", bound, "bucketing.padding_aware") for bound in ("PAD_MAX", "PAD_PERCENT")),
    ("BUCKET_LIMIT", "LIMIT", "bucketing.exponential"),
]
NAMES = [
    *(
        (f"VLLM_{dimension}_{name}", "3", f"{table}.{key}_{bound.lower()}", 3)
        for dimension, key in DIMENSIONS.items()
        for name, bound, table in PARTS
    ),
    ("VLLM_PROMPT_QUERY_BUCKET_MIN", "1", "bucketing.exponential.single_token_prompts", True),
    ("VLLM_PROMPT_CTX_BUCKET_MAX", "3", "bucketing.exponential.prompt_ctx_max", 3),
    *(
        (name, text, f"bucketing.{table}.prompts.{key}", value)
        for table in ("exponential", "linear", "padding_aware")
        for name, text, key, value in (
            ("PT_HPU_SDPA_QKV_SLICE_MODE_FWD", "1", "slice_queries", True),
            ("PT_HPU_SDPA_BC_FACTOR", "512", "slice_tokens", 512),
            ("VLLM_FUSEDSDPA_SLIDE_THLD", "4096", "slice_threshold", 4096),
        )
    ),
    ("VLLM_ENABLE_BUCKETING", "false", "bucketing.name", "exact"),
    ("VLLM_BUCKETING_STRATEGY", "exp", "bucketing.name", "exponential"),
    ("VLLM_BUCKETING_STRATEGY", "lin", "bucketing.name", "linear"),
    ("VLLM_BUCKETING_STRATEGY", "pad", "bucketing.name", "padding_aware"),
    ("VLLM_EXPONENTIAL_BUCKETING", "true", "bucketing.name", "exponential"),
    ("VLLM_EXPONENTIAL_BUCKETING", "false", "bucketing.name", "linear"),
    ("VLLM_BUCKETING_FROM_FILE", "b.txt", "bucketing.name", "from_file"),
    ("VLLM_BUCKETING_FROM_FILE", "b.txt", "bucketing.from_file.path", "b.txt"),
    ("VLLM_PROMPT_BS_BUCKET_MAX", "3", "backend.gaudi.max_prefill_batch_size", 3),
    ("VLLM_SKIP_WARMUP", "true", "engine.warmup", False),
    ("VLLM_PREFIX_CACHING", "false", "cache.prefix_caching", False),
    ("VLLM_PREFIX_CACHING", "false", "backend.gaudi.contiguous", True),
    ("VLLM_CONTIGUOUS_PA", "true", "backend.gaudi.contiguous", True),
    ("VLLM_MERGED_PREFILL", "true", "backend.gaudi.merged_prefill", True),
    ("VLLM_UNIFIED_ATTN", "true", "backend.gaudi.layout", "unified"),
    ("VLLM_PROMPT_USE_FUSEDSDPA", "0", "backend.gaudi.fused_sdpa", False),
    ("VLLM_CONFIG_HIDDEN_LAYERS", "4", "backend.gaudi.mark_layers", 4),
    ("VLLM_GRAPH_RESERVED_MEM", "0.4", "backend.gaudi.graph_reserve", 0.4),
    ("VLLM_GRAPH_PROMPT_RATIO", "0.5", "backend.gaudi.prompt_ratio", 0.5),
    ("VLLM_GRAPH_PROMPT_STRATEGY", "max_bs", "backend.gaudi.prompt_order", "max_bs"),
    ("VLLM_GRAPH_DECODE_STRATEGY", "min_tokens", "backend.gaudi.decode_order", "min_tokens"),
    ("VLLM_DEFRAG", "1", "defragmenter.enabled", "on"),
    ("VLLM_DEFRAG_THRESHOLD", "64", "defragmenter.threshold", 64),
    ("VLLM_DEFRAG_WITH_GRAPHS", "true", "backend.gaudi.defragmenter_graphs", "on"),
    ("VLLM_DEBUG", "defrag,fwd", "defragmenter.log_moves", True),
    ("VLLM_DEBUG", "defrag,fwd", "backend.gaudi.log_passes", True),
    ("VLLM_T_COMPILE_REGIONAL_COMPILATION", "false", "backend.gaudi.regional", False),
    ("VLLM_T_COMPILE_DYNAMIC_SHAPES", "true", "backend.gaudi.dynamic_shapes", True),
    ("VLLM_T_COMPILE_FULLGRAPH", "true", "backend.gaudi.fullgraph", True),
    ("PT_HPU_LAZY_MODE", "0", "backend.gaudi.mode", "compile"),
    ("PT_HPU_LAZY_MODE", "1", "backend.gaudi.mode", "lazy"),
    ("VLLM_LOGGING_LEVEL", "DEBUG", "log.level", "debug"),
    ("VLLM_LOGGING_LEVEL", "CRITICAL", "log.level", "error"),
]


@pytest.fixture(scope="module")
def settings():
    return Registry.discover().settings


def test_name_means_what_it_means_there_and_is_the_source(settings):
    for name, text, path, value in NAMES:
        resolved = load_config(settings=settings, environ={name: text})
        assert resolved.values[path] == value, name
        assert resolved.sources[path] == f"environment {name}"


def test_every_name_that_is_read_is_in_the_list(settings):
    found = {(alias.name, alias.path) for alias in aliases_of(settings) if alias.name.startswith(("VLLM_", "PT_HPU_"))}
    assert found == {(name, path) for name, _, path, _ in NAMES}


@pytest.mark.parametrize(
    ("name", "text", "path"),
    [("VLLM_ENABLE_BUCKETING", "true", "bucketing.name"), ("VLLM_DEBUG", "fwd", "defragmenter.log_moves")],
)
def test_text_may_say_nothing_about_a_setting(settings, name, text, path):
    assert load_config(settings=settings, environ={name: text}).sources[path] == "default"


def test_strategy_that_the_vendor_does_not_have_is_refused(settings):
    said = r'\[bucketing\] name = "exponential" \(from environment VLLM_BUCKETING_STRATEGY\): must be one of: exp, lin, pad\.'
    with pytest.raises(ConfigValueError, match=said):
        load_config(settings=settings, environ={"VLLM_BUCKETING_STRATEGY": "exponential"})


def test_misspelt_bucket_size_is_reported(settings, caplog):
    with caplog.at_level(logging.WARNING, logger="trencadis"):
        load_config(settings=settings, environ={"VLLM_PROMPT_BS_BUCKET_MXA": "2"})
    said = "VLLM_PROMPT_BS_BUCKET_MXA=2 has no effect: there is no such bucket size."
    assert [message for message in caplog.messages if message.startswith(said)]


def test_a_variable_of_the_vendor_asks_for_the_package_that_knows_it():
    def warmup(environ: dict[str, str]) -> bool:
        resolved, registry = load_with_plugins(environ=environ)
        assert (registry.settings.get("backend.gaudi.device") is not None) == bool(environ)
        return resolved.config.engine.warmup

    assert warmup({})
    assert not warmup({"VLLM_SKIP_WARMUP": "true"})


def test_empty_name_says_nothing(settings):
    for name in sorted({name for name, *_ in NAMES}):
        resolved = load_config(settings=settings, environ={name: ""})
        assert set(resolved.sources.values()) == {"default"}, name


def test_explanation_names_the_variable(capsys, monkeypatch):
    monkeypatch.setenv("VLLM_GRAPH_RESERVED_MEM", "0.4")
    monkeypatch.setenv("VLLM_PROMPT_BS_BUCKET_MAX", "4")
    assert main(["config", "--json"]) == 0
    rows = {row["path"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["backend.gaudi.graph_reserve"]["value"] == "0.4"
    assert rows["backend.gaudi.graph_reserve"]["source"] == "environment VLLM_GRAPH_RESERVED_MEM"
    for path in ("backend.gaudi.max_prefill_batch_size", "bucketing.linear.prompt_bs_max"):
        assert rows[path]["source"] == "environment VLLM_PROMPT_BS_BUCKET_MAX"
