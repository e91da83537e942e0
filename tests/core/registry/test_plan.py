from __future__ import annotations

import enum
import types
from pathlib import Path

import attrs
import pytest

import trencadis_kv
from trencadis.config import load_config
from trencadis.errors import (
    CapabilityError,
    ConfigValueError,
    ContractError,
    PluginLoadError,
    UnknownComponentError,
)
from trencadis.hookspecs import hookimpl
from trencadis.registry import Registry, resolve_plan


class Colour(enum.Enum):
    RED = "red"


@attrs.frozen(kw_only=True)
class TunedConfig:
    limit: int = 1
    tags: frozenset[str] = frozenset({"b", "a"})
    colour: Colour = Colour.RED
    file: Path = Path("x")


@attrs.frozen(kw_only=True)
class NeedyConfig:
    url: str


class SelectsGaudi:
    @hookimpl
    def trencadis_select_backend(self, candidates):
        return "gaudi"


def _resolve(registry, **overrides):
    tables = {path.replace("__", "."): value for path, value in overrides.items()}
    resolved = load_config(settings=registry.settings, environ={}, overrides=tables)
    return resolve_plan(resolved.config, registry, sources=resolved.sources)


@pytest.fixture
def registry(house, make_plugin, component):
    extra = make_plugin("extra", scheduling=[component("tuned", config=TunedConfig)], backend=["gaudi"])
    return Registry.discover(entry_points=(), extra_plugins=[house, extra])


def _names(choices):
    return {key: choice.component.name for key, choice in choices.items()}


# ------------------------------------------------------------------------------------------------------ choices


def test_the_default_plan_has_one_component_for_each_noun_that_needs_one(registry):
    plan = _resolve(registry)
    assert _names(plan.choices) == {
        "scheduling": "fair_share",
        "eviction": "lru",
        "sampling": "standard",
        "backend": "torch",
        "executor": "inline",
    }
    assert _names(plan.fallbacks) == {"bucketing": "exact", "scheduling": "fcfs", "eviction": "lru"}
    assert [choice.component.name for choice in plan.observers] == ["log"]


def test_codec_and_policy_are_chosen_beside_a_connector_only(house, make_plugin):
    extra = make_plugin("extra", kv_connector=["shelf"], kv_codec=["none", "zstd"], kv_policy=["cost_aware"])
    registry = Registry.discover(entry_points=(), extra_plugins=[trencadis_kv, house, extra])
    assert not {"kv_codec", "kv_policy"} & set(_resolve(registry).choices)
    plan = _resolve(registry, kv_connector__name="shelf")
    assert {noun: name for noun, name in _names(plan.choices).items() if noun.startswith("kv_")} == {
        "kv_connector": "shelf",
        "kv_codec": "none",
        "kv_policy": "cost_aware",
    }, "a component that is called none is one like any other"


def test_a_router_is_chosen_beside_other_replicas_only(house, make_plugin):
    extra = make_plugin("extra", router=["prefix_affinity", "least_loaded", "round_robin"])
    registry = Registry.discover(entry_points=(), extra_plugins=[house, extra])
    assert "router" not in {*_resolve(registry).choices, *_resolve(registry).fallbacks}
    plan = _resolve(registry, parallel__data=2)
    assert (_names(plan.choices)["router"], _names(plan.fallbacks)["router"]) == ("prefix_affinity", "least_loaded")
    assert _names(_resolve(registry, parallel__data=2, router__name="round_robin").choices)["router"] == "round_robin"


def test_a_role_needs_a_connector_and_is_refused_before_anything_is_built(house, make_plugin):
    extra = make_plugin("extra", kv_connector=["shelf"], kv_codec=["none"], kv_policy=["cost_aware"])
    registry = Registry.discover(entry_points=(), extra_plugins=[trencadis_kv, house, extra])
    with pytest.raises(ConfigValueError) as caught:
        _resolve(registry, engine__role="decode")
    assert str(caught.value) == (
        '[engine] role = "decode" (from argument): there is no KV connector, so that nothing can be handed over. '
        'Set kv_connector.name, such as "p2p", or leave engine.role at "both".'
    )
    _resolve(registry, engine__role="decode", kv_connector__name="shelf")


@pytest.mark.representatives(1000)
@pytest.mark.parametrize(
    ("named", "key"),
    [
        ({"scheduling__name": "daring"}, "name"),
        ({"scheduling__fallback": "daring"}, "fallback"),
        ({"scheduling__shadow": "daring"}, "shadow"),
    ],
)
def test_an_experimental_component_is_refused_in_every_role_until_it_is_accepted(
    house, make_plugin, component, named, key
):
    extra = make_plugin("extra", scheduling=[component("daring", stability="experimental")])
    registry = Registry.discover(entry_points=(), extra_plugins=[house, extra])
    with pytest.raises(ConfigValueError) as caught:
        _resolve(registry, **named)
    assert str(caught.value) == (
        f'[scheduling] {key} = "daring" (from argument): scheduling component "daring" of extra, given in code (plugin "extra") is '
        "experimental: its options and results may change, and it may go away, with any version. "
        "Accept that with [plugins] experimental = true, or --plugins.experimental."
    )
    _resolve(registry, plugins__experimental=True, **named)


def test_every_choice_of_a_plan_has_the_path_that_names_it(registry):
    plan = _resolve(registry, scheduling__shadow="tuned", observer__names=["log", "log"], bucketing__name="exact")
    assert [path for path, _ in plan.named_choices()] == [
        "bucketing.name", "scheduling.name", "eviction.name", "sampling.name", "backend.name", "executor.name",
        "observer.names[0]", "observer.names[1]", "scheduling.shadow",
        "bucketing.fallback", "scheduling.fallback", "eviction.fallback",
    ]  # fmt: skip


def test_an_unknown_name_says_who_set_it(registry):
    with pytest.raises(
        UnknownComponentError, match=r'\[scheduling\] name = "fcsf" \(from argument\).*Did you mean "fcfs"'
    ):
        _resolve(registry, scheduling__name="fcsf")


def test_a_required_value_that_a_config_without_plugins_cannot_have_is_asked_for(house, make_plugin, component):
    needy = make_plugin("extra", backend=[component("gaudi", config=NeedyConfig)])
    registry = Registry.discover(entry_points=(), extra_plugins=[house, needy, SelectsGaudi()])
    with pytest.raises(ConfigValueError, match=r"\[backend\.gaudi\]: a value that .* needs is missing"):
        _resolve(registry)


# ---------------------------------------------------------------------------------------------------- automatic


def test_a_plugin_can_select_the_backend(house, make_plugin):
    plugins = [house, make_plugin("extra", backend=["gaudi"]), SelectsGaudi()]
    registry = Registry.discover(entry_points=(), extra_plugins=plugins)
    assert _resolve(registry).choices["backend"].component.name == "gaudi"
    assert _resolve(registry, backend__name="torch").choices["backend"].component.name == "torch"


def test_a_selected_backend_that_does_not_exist_is_traced_to_the_hook(house):
    registry = Registry.discover(entry_points=(), extra_plugins=[house, SelectsGaudi()])
    with pytest.raises(UnknownComponentError, match=r'"gaudi" \(from trencadis_select_backend\)'):
        _resolve(registry)


def test_a_backend_selection_that_raises_is_a_plugin_error(house):
    class Broken:
        @hookimpl
        def trencadis_select_backend(self, candidates):
            raise OSError("no driver")

    registry = Registry.discover(entry_points=(), extra_plugins=[house, Broken()])
    with pytest.raises(PluginLoadError, match="no driver"):
        _resolve(registry)


@pytest.mark.parametrize(("layout", "name"), [("ragged", "exact"), ("padded", "exponential")])
def test_the_layout_chooses_the_bucketing_that_the_config_leaves_open(registry, layout, name):
    plan = _resolve(registry)
    assert "bucketing" not in plan.choices
    resolved = plan.resolve_bucketing(layout)
    assert resolved.choices["bucketing"].component.name == name
    assert resolved.resolve_bucketing("padded") is resolved


def test_a_layout_that_does_not_exist_breaks_the_contract(registry):
    with pytest.raises(ContractError, match="states layout = 'round'; there are: ragged, padded, unified"):
        _resolve(registry).resolve_bucketing("round")


def test_a_layout_whose_bucketing_is_not_installed_says_so(make_plugin, house, component):
    house.trencadis_bucketings = make_plugin(bucketing=["exact"]).trencadis_bucketings
    plan = _resolve(Registry.discover(entry_points=(), extra_plugins=[house]))
    assert plan.resolve_bucketing("ragged").choices["bucketing"].component.name == "exact"
    with pytest.raises(UnknownComponentError, match='a padded backend takes "exponential", which no plugin offers'):
        plan.resolve_bucketing("padded")


@pytest.fixture
def unified_registry(make_plugin, house, component):
    able = [component(name, provides={"bucketing.unified"}) for name in ("exact", "unified")]
    house.trencadis_bucketings = make_plugin(bucketing=[*able, "exponential"]).trencadis_bucketings
    return Registry.discover(entry_points=(), extra_plugins=[house])


def test_a_unified_layout_takes_the_bucketing_of_that_name_or_another_that_knows_its_shapes(unified_registry):
    resolved = _resolve(unified_registry).resolve_bucketing("unified")
    assert resolved.choices["bucketing"].component.name == "unified"
    named = _resolve(unified_registry, bucketing__name="exact", bucketing__fallback="unified")
    assert named.resolve_bucketing("unified") is named


@pytest.mark.parametrize("path", ["name", "fallback"])
def test_a_bucketing_that_does_not_know_unified_shapes_is_refused_for_a_unified_backend(unified_registry, path):
    plan = _resolve(unified_registry, **{"bucketing__name": "exact", f"bucketing__{path}": "exponential"})
    assert plan.resolve_bucketing("padded") is plan
    words = rf'\[bucketing\] {path} = "exponential".*requires the capability "bucketing\.unified"'
    with pytest.raises(CapabilityError, match=words) as caught:
        plan.resolve_bucketing("unified")
    assert f'Set bucketing.{path} to "unified"' in str(caught.value)


# --------------------------------------------------------------------------------------------------------- hash


def test_the_hash_does_not_depend_on_the_process(registry):
    """The value is frozen: a change means that no earlier result can be matched with its plan any more."""
    assert _resolve(registry, scheduling__name="tuned").plan_hash == "b8766711e08d1bba3db97e86512575d4"


@pytest.mark.parametrize(
    "overrides",
    [
        {"scheduling__name": "fcfs"},
        {"scheduling__tuned__limit": 2},
        {"scheduling__tuned__tags": ["c"]},
        {"backend__name": "gaudi"},
        {"speculation__name": "none", "bucketing__name": "exact"},
        {"observer__names": []},
        {"scheduling__fallback": ""},
    ],
)
def test_the_hash_changes_with_component_and_option(registry, overrides):
    base = {"scheduling__name": "tuned"}
    assert _resolve(registry, **(base | overrides)).plan_hash != _resolve(registry, **base).plan_hash


def test_the_hash_of_a_noun_follows_what_serves_it_and_nothing_else(registry):
    base = _resolve(registry, scheduling__name="tuned")
    of_others = _resolve(registry, scheduling__name="tuned", backend__name="gaudi", observer__names=[])
    assert base.hash_of("scheduling") == of_others.hash_of("scheduling")
    assert base.hash_of("backend") != of_others.hash_of("backend")
    for overrides in ({"scheduling__name": "fcfs"}, {"scheduling__name": "tuned", "scheduling__tuned__limit": 2}):
        assert _resolve(registry, **overrides).hash_of("scheduling") != base.hash_of("scheduling")


def test_the_hash_changes_with_a_version_and_with_a_distribution(house, install, plugin_source):
    hashes = set()
    for distribution, version in [("a-tiles", "1.0"), ("b-tiles", "1.0"), ("c-tiles", "2.0")]:
        points = install(distribution, version, plugin_source("fibonacci"))
        registry = Registry.discover(entry_points=points, extra_plugins=[house])
        plan = _resolve(registry, bucketing__name="fibonacci")
        hashes.add(plan.plan_hash)
        provenance = attrs.evolve(plan.choices["bucketing"].component.provenance, version="9")
        newer = attrs.evolve(plan.choices["bucketing"].component, provenance=provenance)
        choices = {**plan.choices, "bucketing": attrs.evolve(plan.choices["bucketing"], component=newer)}
        hashes.add(attrs.evolve(plan, choices=choices).plan_hash)
    assert len(hashes) == 6


def test_the_hash_is_the_same_before_a_backend_has_said_its_layout_and_after(registry):
    """What ``trencadis plugins`` and the lock show is what an engine shows."""
    plan = _resolve(registry)
    assert "bucketing" not in plan.choices
    resolved = {layout: plan.resolve_bucketing(layout) for layout in ("ragged", "padded")}
    assert {one.plan_hash for one in resolved.values()} == {plan.plan_hash}
    named = _resolve(registry, bucketing__name=resolved["padded"].choices["bucketing"].component.name)
    assert named.plan_hash != plan.plan_hash


def test_the_hash_of_an_option_without_a_text_of_its_own_is_stable(registry):
    def hash_of(value):
        scheduling = {"name": "trencadis.interfaces:SchedulingPolicy", "options": {"x": value}}
        return _resolve(registry, scheduling=scheduling).plan_hash

    assert hash_of(object()) == hash_of(object())
    assert hash_of({1: "a"}) != hash_of({2: "a"})
    assert hash_of(types.MappingProxyType({"a": 1})) == hash_of({"a": 1})
