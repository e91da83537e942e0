from __future__ import annotations

import types

import attrs
import pytest
from attrs.validators import ge, in_

from trencadis.config import load_config
from trencadis.errors import ConfigValueError, UnknownComponentError, UnknownKeyError
from trencadis.hookspecs import hookimpl
from trencadis.interfaces import BucketingStrategy, Component
from trencadis.records import Bucket
from trencadis.registry import Registry
from trencadis_gallery.bucketing.workloads import DeviceCost
from trencadis_testing.bucketing import SAMPLE_LIMITS
from trencadis_tools.commands.bucket_strategies import build_strategies, device_cost

LIMITS = SAMPLE_LIMITS["contiguous"]


@attrs.frozen(kw_only=True)
class EvenConfig:
    """Table ``[bucketing.even]``: has an age and a budget."""

    generation: str = attrs.field(default="new", validator=in_(["new", "old"]))
    max_graphs: int = attrs.field(default=3, validator=ge(1))


@attrs.frozen(kw_only=True)
class LearningConfig:
    """Table ``[bucketing.learning]``: has a trace and costs."""

    trace: str = ""
    cost: DeviceCost = attrs.field(factory=DeviceCost)


@attrs.frozen(kw_only=True)
class StrictConfig:
    """Table ``[bucketing.strict]``: needs a value."""

    path: str


class Kept(BucketingStrategy):
    def __init__(self, config, context):
        self.config, self.context = config, context

    def buckets(self, limits):
        return ()

    def bucket_for(self, shape):
        return Bucket.of(shape)


@pytest.fixture
def registry():
    module = types.ModuleType("bucket_test_plugin")
    classes = {"even": EvenConfig, "learning": LearningConfig, "strict": StrictConfig}
    components = [
        Component(name=name, factory=Kept, config=config, summary="One.", interface_version=1)
        for name, config in classes.items()
    ]
    module.trencadis_bucketings = hookimpl(specname="trencadis_bucketings")(lambda: components)
    return Registry.discover(entry_points=(), extra_plugins=[module])


def config_of(registry, **overrides):
    return load_config(settings=registry.settings, environ={}, overrides=overrides).config


def build(registry, *names, flags=None, **overrides):
    given = dict.fromkeys(names, "flag --strategy")
    return build_strategies(given, flags or {}, LIMITS, config_of(registry, **overrides), registry)


def test_strategy_gets_limits_and_configured_options(registry):
    built = build(registry, "even", **{"bucketing.even.max_graphs": 7})["even"]
    assert built.config == EvenConfig(max_graphs=7)
    assert built.context.limits == LIMITS


def test_flag_is_stronger_than_the_configuration(registry):
    flags = {"generation": "old", "max_graphs": None}
    built = build(registry, "even", flags=flags, **{"bucketing.even.generation": "new"})["even"]
    assert built.config == EvenConfig(generation="old")


def test_each_strategy_takes_the_flags_that_it_knows(registry):
    built = build(registry, "even", "learning", flags={"generation": "old", "trace": "t.csv"})
    assert built["even"].config == EvenConfig(generation="old")
    assert built["learning"].config == LearningConfig(trace="t.csv")


def test_trace_need_not_be_known_but_other_flags_must_be_by_one(registry):
    build(registry, "even", flags={"trace": "t.csv"})
    with pytest.raises(UnknownKeyError, match="flag --max-graphs: learning has no option max_graphs"):
        build(registry, "learning", flags={"max_graphs": 3})


def test_refused_value_names_flag_and_choices(registry):
    with pytest.raises(ConfigValueError) as caught:
        build(registry, "even", flags={"generation": "older"})
    said = '[bucketing.even] generation = "older" (from flag --generation): did you mean "old"? It must be one of: new, old.'
    assert str(caught.value).startswith(said)


def test_missing_option_is_named(registry):
    with pytest.raises(
        ConfigValueError, match=r"\[bucketing.strict\] path: not set, and .* needs it.*--bucketing.strict.path"
    ):
        build(registry, "strict")


def test_unknown_name_lists_the_choices(registry):
    with pytest.raises(UnknownComponentError, match="Choose one of: even, learning, strict"):
        build(registry, "evne")


def test_costs_are_those_a_strategy_is_configured_with(registry):
    assert device_cost(config_of(registry)) == DeviceCost()
    configured = config_of(registry, **{"bucketing.learning.cost.compile_s": 9.0})
    assert device_cost(configured) == DeviceCost(compile_s=9.0)
    assert device_cost(load_config(environ={}).config) == DeviceCost()
