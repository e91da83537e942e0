from __future__ import annotations

import functools

import attrs
import pytest

from trencadis.clock import SimulatedClock
from trencadis.config import Config
from trencadis.errors import (
    ConfigError,
    ConfigValueError,
    ContractError,
    PluginLoadError,
    TrencadisError,
    UnknownComponentError,
)
from trencadis.hookspecs import hookimpl
from trencadis.interfaces import ComponentContext, NoConfig, SchedulingPolicy
from trencadis.interfaces.kv_connector import ConnectorPair
from trencadis.registry import Registry

CONTEXT = ComponentContext(clock=SimulatedClock(), seed=0)


class Listener:
    """A plugin that writes down what it is told."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    @hookimpl
    def trencadis_configure(self, config):
        self.heard.append(config)

    @hookimpl
    def trencadis_engine_ready(self, model, plan_hash):
        self.heard.append((model, plan_hash))

    @hookimpl
    def trencadis_engine_closing(self):
        self.heard.append("closing")


class LateListener(Listener):
    pass


class Grumpy:
    @hookimpl
    def trencadis_configure(self, config):
        raise OSError("no licence")

    @hookimpl
    def trencadis_engine_ready(self):
        raise ConfigError("refused in words")


@pytest.fixture
def registry(house):
    return Registry.discover(entry_points=(), extra_plugins=[house])


def _said(error_type, call, *arguments, **named):
    with pytest.raises(error_type) as caught:
        call(*arguments, **named)
    return str(caught.value)


# -------------------------------------------------------------------------------------------------- components


def test_settings_have_the_tables_of_the_components(registry):
    tables = registry.settings.tables()
    assert tables["bucketing.exact"] is tables["bucketing.exponential"] is NoConfig
    assert registry.settings.components_of("kv_connector") == []


def test_an_unknown_name_lists_the_choices_and_suggests(registry):
    assert _said(UnknownComponentError, registry.select, "bucketing", "exponentail", source="serve.toml") == (
        '[bucketing] name = "exponentail" (from serve.toml): no such component. Did you mean "exponential"? '
        'Choose one of: exact, exponential. To use another one, install its package, or give an import path "package.module:Class".'
    )


def test_an_unknown_name_of_a_noun_without_components_says_so(registry):
    said = _said(UnknownComponentError, registry.select, "kv_connector", "redis", key="fallback")
    assert said.startswith(
        '[kv_connector] fallback = "redis": no such component. No plugin offers any kv_connector component.'
    )


# ------------------------------------------------------------------------------------------------------- build


def test_a_factory_is_given_config_and_context(make_plugin, component):
    seen = []

    def factory(config, context):
        seen.append((config, context))
        return SchedulingPolicy()

    registry = Registry.discover(
        entry_points=(), extra_plugins=[make_plugin(scheduling=[component("x", factory=factory)])]
    )
    config = NoConfig()
    chosen = registry.select("scheduling", "x")
    assert isinstance(registry.build(chosen, config, CONTEXT), SchedulingPolicy)
    assert seen == [(config, attrs.evolve(CONTEXT, label=str(chosen)))]


def test_a_factory_that_raises_names_component_and_cause(make_plugin, component):
    def factory(config, context):
        raise ImportError("no module named redis")

    registry = Registry.discover(
        entry_points=(), extra_plugins=[make_plugin(scheduling=[component("x", factory=factory)])]
    )
    assert _said(PluginLoadError, registry.build, registry.select("scheduling", "x"), NoConfig(), CONTEXT) == (
        'scheduling component "x" of test_plugin, given in code (plugin "test_plugin") could not be built: '
        "ImportError: no module named redis. Correct it, or do not pass it."
    )


def test_an_error_in_our_words_passes_a_factory_unchanged(make_plugin, component):
    def factory(config, context):
        raise ConfigError("said in words")

    registry = Registry.discover(
        entry_points=(), extra_plugins=[make_plugin(scheduling=[component("x", factory=factory)])]
    )
    assert (
        _said(TrencadisError, registry.build, registry.select("scheduling", "x"), NoConfig(), CONTEXT)
        == "said in words"
    )


def test_an_error_about_an_option_says_who_set_it(make_plugin, component):
    def factory(config, context):
        raise ConfigValueError("[scheduling.x] limit = 3: too small.", hint="Raise it.")

    registry = Registry.discover(
        entry_points=(), extra_plugins=[make_plugin(scheduling=[component("x", factory=factory)])]
    )
    registry.sources = {"scheduling.x.limit": "environment OTHER_LIMIT"}
    with pytest.raises(ConfigValueError) as caught:
        registry.build(registry.select("scheduling", "x"), NoConfig(), CONTEXT)
    assert str(caught.value) == "[scheduling.x] limit = 3 (from environment OTHER_LIMIT): too small. Raise it."


def test_a_factory_that_returns_another_type_breaks_the_contract(make_plugin, component):
    plugin = make_plugin(kv_connector=[component("x", factory=lambda config, context: "pair")])
    registry = Registry.discover(entry_points=(), extra_plugins=[plugin])
    said = _said(ContractError, registry.build, registry.select("kv_connector", "x"), NoConfig(), CONTEXT)
    assert f"built a str, which is no {ConnectorPair.__name__}" in said


# ------------------------------------------------------------------------------------------------------- hooks


def test_a_plugin_registered_late_still_sees_the_configuration():
    first, late, config = Listener(), LateListener(), Config()
    registry = Registry.discover(entry_points=(), extra_plugins=[first])
    registry.hooks.configure(config)
    registry.register(late)
    assert first.heard == [config] == late.heard


def test_an_equal_configuration_is_shown_once():
    listener = Listener()
    registry = Registry.discover(entry_points=(), extra_plugins=[listener])
    registry.hooks.configure(Config())
    registry.hooks.configure(Config())
    assert len(listener.heard) == 1


def test_a_plugin_registered_late_brings_its_components(registry, make_plugin):
    registry.register(make_plugin("late", kv_connector=["redis"]))
    assert "redis" in registry.components("kv_connector")
    assert "late" in registry.plugins


def test_a_blocked_plugin_cannot_come_late(make_plugin):
    registry = Registry.discover(entry_points=(), blocked=["late"])
    registry.register(make_plugin("late", kv_connector=["redis"]))
    assert registry.components("kv_connector") == {}


def test_what_a_plugin_prints_while_it_is_loaded_goes_to_standard_error(install, plugin_source, capsys):
    source = f"print('imported')\n{plugin_source('x')}    print('collected')\n"
    Registry.discover(entry_points=install("chatty", "1.0", source))
    assert capsys.readouterr() == ("", "imported\ncollected\n")


def test_a_life_cycle_hook_that_raises_names_plugin_hook_and_cause():
    registry = Registry.discover(entry_points=(), extra_plugins=[Listener(), Grumpy(), LateListener()])
    assert _said(PluginLoadError, registry.hooks.configure, Config()) == (
        f'{__name__}, given in code (plugin "Grumpy") raised in trencadis_configure: OSError: no licence. '
        "Correct it, or do not pass it."
    )


def test_of_plugins_that_share_a_life_cycle_hook_all_are_named():
    class Heir(Grumpy):
        pass

    registry = Registry.discover(entry_points=(), extra_plugins=[Listener(), Grumpy(), Heir()])
    said = _said(PluginLoadError, registry.hooks.configure, Config())
    assert said.startswith("A plugin raised in trencadis_configure: OSError: no licence. Plugins with this hook: ")
    assert 'plugin "Grumpy"' in said
    assert 'Heir")' in said
    assert 'plugin "Listener"' not in said


def test_a_life_cycle_hook_may_raise_in_our_words():
    registry = Registry.discover(entry_points=(), extra_plugins=[Grumpy()])
    assert _said(ConfigError, registry.hooks.ready, None, "") == "refused in words"


def test_the_first_plugin_that_answers_selects_the_backend(make_plugin):
    class Silent:
        @hookimpl(tryfirst=True)
        def trencadis_select_backend(self, candidates):
            return None

    class Gaudi:
        @hookimpl
        def trencadis_select_backend(self, candidates):
            return next((name for name in candidates if name == "gaudi"), None)

    plugins = [Silent(), Gaudi(), make_plugin(backend=["gaudi", "torch"])]
    for given, selected in ((plugins, "gaudi"), (plugins[:2], "torch")):
        registry = Registry.discover(entry_points=(), extra_plugins=given)
        assert registry.hooks.select_backend("torch", functools.partial(registry.components, "backend")) == selected
