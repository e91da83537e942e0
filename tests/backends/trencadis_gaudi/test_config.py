from __future__ import annotations

import attrs
import pytest

from trencadis.config import load_config
from trencadis.errors import ConfigValueError
from trencadis_gaudi.config import GaudiConfig


def read(environ):
    """The table as the loader reads it from an environment."""
    components = {"backend": {"gaudi": GaudiConfig}}
    return load_config(components=components, environ=environ).config.backend.components["gaudi"]


@pytest.mark.parametrize(
    ("environ", "name", "value"),
    [
        ({"PT_HPU_LAZY_MODE": "0"}, "mode", "compile"),
        ({"PT_HPU_LAZY_MODE": "1"}, "mode", "lazy"),
        ({"VLLM_GRAPH_RESERVED_MEM": "0.25"}, "graph_reserve", 0.25),
        ({"VLLM_GRAPH_PROMPT_RATIO": "0.5"}, "prompt_ratio", 0.5),
        ({"VLLM_GRAPH_PROMPT_STRATEGY": "max_bs"}, "prompt_order", "max_bs"),
        ({"VLLM_GRAPH_DECODE_STRATEGY": "min_tokens"}, "decode_order", "min_tokens"),
        ({"VLLM_CONTIGUOUS_PA": "true"}, "contiguous", True),
        ({"VLLM_PROMPT_BS_BUCKET_MAX": "4"}, "max_prefill_batch_size", 4),
        ({"VLLM_MERGED_PREFILL": "1"}, "merged_prefill", True),
        ({"VLLM_UNIFIED_ATTN": "true"}, "layout", "unified"),
        ({"VLLM_PROMPT_USE_FUSEDSDPA": "false"}, "fused_sdpa", False),
        ({"VLLM_CONFIG_HIDDEN_LAYERS": "4"}, "mark_layers", 4),
        ({"VLLM_T_COMPILE_REGIONAL_COMPILATION": "no"}, "regional", False),
        ({"VLLM_T_COMPILE_FULLGRAPH": "yes"}, "fullgraph", True),
        ({"VLLM_DEFRAG_WITH_GRAPHS": "true"}, "defragmenter_graphs", "on"),
        ({"VLLM_DEFRAG_WITH_GRAPHS": "0"}, "defragmenter_graphs", "off"),
        ({"VLLM_DEBUG": "defrag,fwd"}, "log_passes", True),
        ({"VLLM_DEBUG": "defrag"}, "log_passes", False),
    ],
)
def test_environment_names_of_the_vendors_plugin_mean_the_same(environ, name, value):
    assert getattr(read(environ), name) == value


def test_bad_lazy_mode_is_refused_with_the_name_of_its_variable():
    with pytest.raises(ConfigValueError, match="PT_HPU_LAZY_MODE"):
        read({"PT_HPU_LAZY_MODE": "maybe"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory_utilization", 0.0),
        ("memory_utilization", 1.01),
        ("graph_reserve", 1.0),
        ("graph_reserve", -0.1),
        ("prompt_ratio", 1.5),
        ("mode", "graph"),
        ("device", "cpu"),
        ("max_prefill_batch_size", 0),
        ("mark_layers", -1),
        ("emulated_memory_bytes", 0),
    ],
)
def test_values_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        GaudiConfig(**{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capture": "budgeted", "mode": "compile"}, "HPU graphs exist in lazy mode only"),
        ({"defragmenter_graphs": "on", "mode": "eager"}, "nothing is captured or compiled there"),
        ({"emulated_frozen": True, "device": "hpu"}, "only the emulated device"),
        ({"merged_prefill": True}, "there is nothing to merge"),
        ({"layout": "unified", "contiguous": True}, "reads unshared blocks by range"),
        ({"layout": "unified", "merged_prefill": True, "max_prefill_batch_size": 2}, "in one row as it is"),
        ({"recipe_cache": "/tmp"}, "not of the form"),
        ({"recipe_cache": "/tmp,yes,10"}, "not of the form"),
    ],
)
def test_keys_that_contradict_each_other_are_refused_with_a_remedy(options, message):
    with pytest.raises(ConfigValueError, match=message) as caught:
        GaudiConfig(**options).check()
    assert caught.value.hint


def test_defaults_are_consistent_in_every_mode():
    for mode in ("lazy", "compile", "eager"):
        GaudiConfig(mode=mode).check()
    GaudiConfig(recipe_cache="/tmp/recipes,false,1024").check()


def test_swaps_are_graphs_by_default_only_with_torch_compile():
    assert [GaudiConfig(mode=mode).swaps_in_graphs for mode in ("lazy", "compile", "eager")] == [False, True, False]
    assert GaudiConfig(mode="lazy", defragmenter_graphs="on").swaps_in_graphs
    assert not GaudiConfig(mode="compile", defragmenter_graphs="off").swaps_in_graphs


def test_every_key_is_explained():
    for field in attrs.fields(GaudiConfig):
        assert field.metadata["help"].endswith("."), field.name
