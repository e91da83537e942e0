from __future__ import annotations

import pytest

from trencadis.errors import BackendError
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.environment import defaults_of, demands_of, set_environment


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


def test_too_late_to_change_the_mode_is_an_error_and_nothing_else_is_set():
    environ = {"PT_HPU_LAZY_MODE": "0"}
    with pytest.raises(BackendError, match="imported already") as caught:
        set_environment(GaudiConfig(mode="lazy"), environ, {"habana_frameworks.torch": object()})
    assert "PT_HPU_LAZY_MODE=1" in caught.value.hint
    assert environ == {"PT_HPU_LAZY_MODE": "0"}
    environ["PT_HPU_LAZY_MODE"] = "1"
    set_environment(GaudiConfig(mode="lazy"), environ, {"habana_frameworks.torch": object()})
    assert environ == {"PT_HPU_LAZY_MODE": "1"}
