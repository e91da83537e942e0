"""Components that other components name in their config."""

from __future__ import annotations

import types

import attrs
import pytest

from trencadis.config import load_config
from trencadis.engine.build import build_engine
from trencadis.errors import ConfigValueError, ContractError, UnknownComponentError
from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, SchedulingPolicy
from trencadis.registry import resolve_plan


@attrs.frozen(kw_only=True)
class AroundConfig:
    inner: str = attrs.field(default="plain", metadata={"help": "Which.", "unit": "", "component": "scheduling"})


@attrs.frozen(kw_only=True)
class PlainConfig:
    depth: int = 1


@attrs.frozen(kw_only=True)
class SeveralConfig:
    members: tuple[str, ...] = attrs.field(
        default=("plain", "around"), metadata={"help": "Which.", "unit": "", "component": "scheduling"}
    )


class Plain(SchedulingPolicy):
    def __init__(self, depth: int) -> None:
        self.depth = depth


class Around(SchedulingPolicy):
    def __init__(self, inner: SchedulingPolicy) -> None:
        self.inner = inner


@pytest.fixture
def plugin() -> types.ModuleType:
    module = types.ModuleType("around_plugin")

    def around(config: AroundConfig, context: object) -> Around:
        return Around(context.make("scheduling", config.inner))

    @hookimpl
    def trencadis_scheduling_policies():
        for name in ("around", "other_around"):
            yield Component(name=name, factory=around, config=AroundConfig, summary="Around.", interface_version=1)
        yield Component(
            name="several",
            factory=lambda config, context: [context.make("scheduling", name) for name in config.members],
            config=SeveralConfig,
            summary="Several.",
            interface_version=1,
        )
        yield Component(
            name="plain",
            factory=lambda config, context: Plain(config.depth),
            config=PlainConfig,
            summary="Plain.",
            interface_version=1,
        )

    module.trencadis_scheduling_policies = trencadis_scheduling_policies
    return module


@pytest.fixture
def resolve(plugin, fake_house):
    """``resolve({path: value})`` returns config and registry of a whole house with the plugin's policies."""

    def make(overrides):
        _, registry = fake_house()
        registry.register(plugin)
        names = {f"{noun}.name": "fake" for noun in ("bucketing", "eviction", "sampling", "backend", "executor")}
        fallbacks = {f"{noun}.fallback": "" for noun in ("bucketing", "scheduling", "eviction")}
        sizes = {"cache.num_blocks": 64, "cache.block_size": 4, "observer.names": []}
        tables = {**names, **fallbacks, **sizes, "scheduling.name": "around", **overrides}
        resolved = load_config(settings=registry.settings, environ={}, overrides=tables)
        return resolved.config, registry

    return make


def test_the_inner_component_gets_its_own_table(resolve) -> None:
    config, registry = resolve({"scheduling.plain.depth": 7})
    engine = build_engine(config, registry=registry)
    policy = engine._policy.strategy
    assert isinstance(policy, Around)
    assert policy.inner.depth == 7
    engine.close()


def test_an_inner_one_may_have_an_inner_one(resolve) -> None:
    config, registry = resolve({"scheduling.around.inner": "other_around"})
    engine = build_engine(config, registry=registry)
    assert isinstance(engine._policy.strategy.inner.inner, Plain)
    engine.close()


def test_the_inner_one_s_options_are_part_of_the_plan_s_hash(resolve) -> None:
    hashes = {resolve_plan(*resolve({"scheduling.plain.depth": depth})).plan_hash for depth in (1, 2)}
    assert len(hashes) == 2


def test_an_unknown_inner_component_is_refused_at_the_start_with_the_choices(resolve) -> None:
    with pytest.raises(
        UnknownComponentError,
        match=r"\[scheduling.around\] inner = \"plian\".*no such component.*Did you mean \"plain\"",
    ):
        resolve_plan(*resolve({"scheduling.around.inner": "plian"}))


def test_a_field_may_name_several(resolve) -> None:
    plan = resolve_plan(*resolve({"scheduling.name": "several", "scheduling.plain.depth": 7}))
    assert list(plan.inner) == [
        "scheduling.several.members[0]",
        "scheduling.several.members[1]",
        "scheduling.around.inner",
    ]
    assert plan.inner_choice("scheduling", "plain").options == PlainConfig(depth=7)


def test_each_of_several_is_looked_up(resolve) -> None:
    with pytest.raises(UnknownComponentError, match=r"\[scheduling.several\] members = \"plian\".*no such component"):
        resolve_plan(*resolve({"scheduling.name": "several", "scheduling.several.members": ["plain", "plian"]}))


@pytest.mark.parametrize(
    "overrides",
    [
        {"scheduling.name": "several", "scheduling.several.members": ["plain", "several"]},
        {"scheduling.around.inner": "around"},
        {"scheduling.around.inner": "other_around", "scheduling.other_around.inner": "around"},
    ],
)
def test_nothing_can_be_within_itself(resolve, overrides) -> None:
    with pytest.raises(ConfigValueError, match="it would be within itself"):
        resolve_plan(*resolve(overrides))


def test_a_fallback_may_have_an_inner_one_too(resolve) -> None:
    plan = resolve_plan(*resolve({"scheduling.name": "plain", "scheduling.fallback": "around"}))
    assert set(plan.inner) == {"scheduling.around.inner"}


def test_only_what_a_config_names_can_be_made(resolve) -> None:
    plan = resolve_plan(*resolve({}))
    assert plan.inner_choice("scheduling", "plain").options == PlainConfig()
    with pytest.raises(ContractError, match="asks for the eviction component 'fake', which no field of a config names"):
        plan.inner_choice("eviction", "fake")
