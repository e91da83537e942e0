from __future__ import annotations

from types import SimpleNamespace

import pytest

from trencadis.errors import BackendError
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
