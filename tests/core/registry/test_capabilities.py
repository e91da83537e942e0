from __future__ import annotations

import itertools

import pytest

from trencadis.config import load_config
from trencadis.errors import CapabilityError
from trencadis.registry import Registry, resolve_plan
from trencadis.registry.capabilities import negotiate

TREE = "backend.tree_attention"


@pytest.fixture
def registry(house, make_plugin, component):
    extra = make_plugin(
        "extra",
        backend=[component("gaudi", provides={TREE, "backend.graphs"}), component("tiny")],
        speculation=[component("tree", requires={TREE}), component("plain")],
        scheduling=[component("fancy", requires={"observer.clock"})],
        observer=[component("clock", provides={"observer.clock"})],
    )
    return Registry.discover(entry_points=(), extra_plugins=[house, extra])


def _plan(registry, **overrides):
    resolved = load_config(
        settings=registry.settings,
        environ={},
        overrides={path.replace("__", "."): value for path, value in overrides.items()},
    )
    return resolve_plan(resolved.config, registry, sources=resolved.sources)


def test_a_requirement_that_nobody_meets_names_both_sides_and_who_could(registry):
    with pytest.raises(CapabilityError) as caught:
        _plan(registry, speculation__name="tree", backend__name="tiny")
    assert str(caught.value) == (
        '[speculation] name = "tree" (from argument): requires the capability "backend.tree_attention", which '
        '[backend] name = "tiny" does not provide. Change one of the two; it is provided by: [backend] "gaudi".'
    )


@pytest.mark.parametrize(
    ("backend", "speculation"), list(itertools.product(["torch", "tiny", "gaudi"], ["none", "plain", "tree"]))
)
def test_the_matrix_holds_exactly_where_the_backend_provides(registry, backend, speculation):
    if speculation == "tree" and backend != "gaudi":
        with pytest.raises(CapabilityError):
            _plan(registry, backend__name=backend, speculation__name=speculation)
    else:
        _plan(registry, backend__name=backend, speculation__name=speculation)


def test_an_observer_can_provide(registry):
    assert (
        _plan(registry, scheduling__name="fancy", observer__names=["log", "clock"]).observers[1].component.name
        == "clock"
    )


def test_a_fallbacks_requirements_count_too(registry):
    with pytest.raises(CapabilityError, match=r'\[scheduling\] fallback = "fancy"'):
        _plan(registry, scheduling__fallback="fancy")


def test_a_capability_that_nothing_installed_provides_says_so(house, make_plugin, component):
    plugin = make_plugin("extra", eviction=[component("odd", requires={"weather.sunny"})])
    registry = Registry.discover(entry_points=(), extra_plugins=[house, plugin])
    with pytest.raises(CapabilityError) as caught:
        _plan(registry, eviction__name="odd")
    assert str(caught.value) == (
        '[eviction] name = "odd" (from argument): requires the capability "weather.sunny", which no chosen component '
        "provides. No installed component provides it; choose another component."
    )


def test_every_combination_of_two_built_ins_is_possible_or_refused():
    registry = Registry.discover()
    plan = _plan(registry)
    default = {noun: choice.component for noun, choice in plan.choices.items()}
    default["bucketing"] = plan.by_layout["ragged"].component
    offered = [item for noun in registry.nouns for item in registry.components(noun).values()]
    for first, second in itertools.combinations(offered, 2):
        chosen = {**default, first.noun: first, second.noun: second}
        required = frozenset[str]().union(*(item.component.requires for item in chosen.values()))
        provided = frozenset[str]().union(*(item.component.provides for item in chosen.values()))
        pairs = [(f"{noun}.name", item) for noun, item in chosen.items()]
        if required <= provided:
            negotiate(pairs, offers=offered)
        else:
            with pytest.raises(CapabilityError, match="requires the capability"):
                negotiate(pairs, offers=offered)


def test_every_requirement_of_a_built_in_is_provided_by_some_built_in():
    registry = Registry.discover()
    offered = [item.component for noun in registry.nouns for item in registry.components(noun).values()]
    required = frozenset[str]().union(*(item.requires for item in offered))
    assert required <= frozenset[str]().union(*(item.provides for item in offered))
