from __future__ import annotations

from types import SimpleNamespace

import attrs
import pytest

from trencadis.config import load_config
from trencadis.errors import BackendError, ConfigValueError
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.environment import defaults_of, demands_of, release_of, set_environment, with_mode


@pytest.mark.parametrize(("mode", "value"), [("lazy", "1"), ("compile", "0"), ("eager", "0")])
def test_mode_decides_lazy_mode(mode, value):
    environ = {}
    set_environment(GaudiConfig(mode=mode), environ, {})
    assert environ["PT_HPU_LAZY_MODE"] == value


def test_recipe_cache_is_handed_on():
    assert "PT_HPU_RECIPE_CACHE_CONFIG" not in demands_of(GaudiConfig())
    config = GaudiConfig(recipe_cache="/var/recipes,false,2048")
    assert demands_of(config)["PT_HPU_RECIPE_CACHE_CONFIG"] == "/var/recipes,false,2048"


def test_what_is_set_already_is_left_alone_unless_the_config_decides_it(caplog):
    environ = {"PT_HPU_WEIGHT_SHARING": "1", "PT_HPU_LAZY_MODE": "0"}
    set_environment(GaudiConfig(mode="lazy"), environ, {})
    assert environ["PT_HPU_WEIGHT_SHARING"] == "1"
    assert environ["PT_HPU_LAZY_MODE"] == "1"
    assert "PT_HPU_LAZY_MODE=0 is overridden with 1" in caplog.text


def test_defaults_of_the_modes_differ_as_the_vendors_plugin_sets_them():
    lazy, compiled = (defaults_of(GaudiConfig(mode=mode)) for mode in ("lazy", "compile"))
    assert lazy["PT_HPU_ENABLE_LAZY_COLLECTIVES"] == "true"
    assert "PT_HPU_ENABLE_LAZY_COLLECTIVES" not in compiled
    assert compiled["RUNTIME_SCALE_PATCHING"] == compiled["FUSER_ENABLE_MULTI_THREADED_INVOCATIONS"] == "1"
    assert lazy["PT_HPU_WEIGHT_SHARING"] == compiled["PT_HPU_WEIGHT_SHARING"] == "0"
    assert "PT_HPU_METRICS_GC_DETAILS" not in defaults_of(GaudiConfig(watch_compilations=False))


def imported(*, lazy):
    """The modules of a process in which torch has imported the Gaudi software."""
    internal = SimpleNamespace(is_lazy=lambda: lazy)
    return {"habana_frameworks.torch": SimpleNamespace(utils=SimpleNamespace(internal=internal))}


@pytest.mark.parametrize(("mode", "lazy", "needed"), [("lazy", False, 1), ("compile", True, 0), ("eager", True, 0)])
def test_software_that_is_imported_in_another_mode_is_an_error_and_nothing_is_set(mode, lazy, needed):
    environ = {}
    with pytest.raises(BackendError, match="Importing torch imports it") as caught:
        set_environment(GaudiConfig(mode=mode), environ, imported(lazy=lazy))
    assert f"PT_HPU_LAZY_MODE={needed}" in caught.value.hint
    assert environ == {}


@pytest.mark.parametrize(("mode", "lazy"), [("lazy", True), ("compile", False), ("eager", False)])
def test_software_that_is_imported_in_the_mode_is_used_whatever_the_environment_says(mode, lazy, caplog):
    environ = {}
    config = GaudiConfig(mode=mode, recipe_cache="/var/recipes,false,2048")
    assert set_environment(config, environ, imported(lazy=lazy)) == config
    assert environ == {}
    assert "PT_HPU_RECIPE_CACHE_CONFIG=/var/recipes,false,2048 has no effect" in caplog.text


@pytest.mark.parametrize(
    ("options", "release", "is_lazy", "mode"),
    [
        ({}, None, None, "compile"),
        ({}, (1, 19), None, "lazy"),
        ({}, (1, 20), None, "compile"),
        ({}, (1, 22), True, "lazy"),
        ({}, (1, 19), False, "compile"),
        ({"capture": "budgeted"}, (1, 22), None, "lazy"),
        ({"mode": "eager"}, (1, 19), None, "eager"),
    ],
)
def test_mode_is_chosen_by_release_and_the_choice_is_logged(options, release, is_lazy, mode, caplog):
    caplog.set_level("INFO", "trencadis.gaudi")
    assert with_mode(GaudiConfig(**options), release=release, is_lazy=is_lazy).mode == mode
    assert (f"[backend.gaudi] mode = {mode}: " in caplog.text) == ("mode" not in options)


def test_mode_is_none_that_would_need_other_graphs():
    with pytest.raises(BackendError, match="PT_HPU_LAZY_MODE=0"):
        with_mode(GaudiConfig(capture="budgeted"), release=(1, 22), is_lazy=False)


@pytest.mark.parametrize(
    ("version", "release"), [("1.22.1", (1, 22)), ("1.19.0.561", (1, 19)), ("2", None), ("dev", None)]
)
def test_release_is_the_first_two_numbers(version, release):
    assert release_of(version) == release


@pytest.mark.parametrize(
    ("environ", "module"),
    [
        ({}, None),
        ({"TRENCADIS_LOCAL_RANK": "3"}, "3"),
        ({"TRENCADIS_LOCAL_RANK": "1", "HABANA_VISIBLE_MODULES": "6, 4"}, "4"),
        ({"TRENCADIS_LOCAL_RANK": "0", "HLS_MODULE_ID": "7"}, "7"),
        ({"HLS_MODULE_ID": "7"}, "7"),
    ],
)
def test_a_rank_takes_a_module_of_its_own(environ, module):
    set_environment(GaudiConfig(mode="lazy"), environ, {})
    assert environ.get("HLS_MODULE_ID") == module
    set_environment(GaudiConfig(mode="lazy"), environ, {})  # when the backend is made, once more
    assert environ.get("HLS_MODULE_ID") == module


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"HABANA_VISIBLE_MODULES": "6,4"}, "HABANA_VISIBLE_MODULES=6,4 names 2 modules, and this is rank 2"),
        ({"HLS_MODULE_ID": "6"}, "HLS_MODULE_ID=6 gives every rank the same module; this is rank 2"),
    ],
)
def test_a_rank_without_a_module_is_an_error(environ, told):
    with pytest.raises(BackendError, match=told) as caught:
        set_environment(GaudiConfig(mode="lazy"), {"TRENCADIS_LOCAL_RANK": "2", **environ}, {})
    assert caught.value.hint


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
