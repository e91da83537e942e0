from __future__ import annotations

import attrs
import pytest

from trencadis.config import Config
from trencadis.config.schema import FixedNounConfig, NounConfig, ObserverConfig
from trencadis.errors import TransferError
from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, Observer
from trencadis.records import ModelFacts
from trencadis.registry import Registry, load_with_plugins
from trencadis_kv.store.settings import StoreSettings
from trencadis_kv.store.store_connector import store_connector
from trencadis_testing.kv_faults import DictStore
from trencadis_tools.doctor import Findings
from trencadis_tools.doctor.components import check_components


def kinds(told):
    return [kind for kind, _ in told()]


def test_active_components_are_built_once_each_and_closed_or_doubtful(found, told, fake_house):
    closed = []

    class Watching(Observer):
        def close(self):
            closed.append(self)
            if len(closed) > 1:
                raise KeyError("stuck")

    config, registry = fake_house()
    add(registry, "observer", lambda config, context: Watching())
    config = attrs.evolve(config, observer=ObserverConfig(names=("mine",)))
    check_components(found, registry, config, {}, None)
    assert set(kinds(told)) == {"ok"}
    assert len(closed) == 1
    nouns = [message.split(":")[0] for _, message in told()]
    assert nouns == ["bucketing", "scheduling", "eviction", "sampling", "backend", "executor", "observer"]
    assert "no distribution, interface 1, can be built" in told()[0][1]
    check_components(found, registry, config, {}, None)
    assert told()[-1][0] == "warn"
    assert "not closed again: KeyError: 'stuck'" in told()[-1][1]


def test_component_that_cannot_be_built_is_named_and_the_others_are_built(found, told, fake_house):
    def raises():
        raise ZeroDivisionError("no reason")

    config, registry = fake_house(policy=raises)
    check_components(found, registry, config, {}, None)
    (message,) = (message for kind, message in told() if kind == "fail")
    assert "scheduling component" in message
    assert "ZeroDivisionError: no reason" in message
    assert kinds(told).count("ok") == 5


def test_plugin_that_raises_when_it_is_shown_the_configuration_is_named_and_components_are_built(
    found, told, fake_house
):
    class Grumpy:
        @hookimpl
        def trencadis_configure(self, config):
            raise OSError("no licence")

    config, registry = fake_house()
    registry.register(Grumpy())
    check_components(found, registry, config, {}, None)
    assert told()[0][0] == "fail"
    assert 'Grumpy") raised in trencadis_configure: OSError: no licence.' in told()[0][1]
    assert kinds(told)[1:] == ["ok"] * 6


def test_every_unknown_name_is_found(found, told, fake_house):
    config, registry = fake_house()
    config = attrs.evolve(
        config,
        scheduling=NounConfig(name="fcsf"),
        observer=ObserverConfig(names=("loog",)),
        eviction=NounConfig(name="x:y"),
    )
    check_components(found, registry, config, {"scheduling.name": "serve.toml"}, None)
    messages = [message for kind, message in told() if kind == "fail"]
    assert messages[0].startswith('[scheduling] name = "fcsf" (from serve.toml): no such component.')
    assert len(messages) == 3


def test_components_that_do_not_fit_each_other_are_wrong(found, told, fake_house):
    config, registry = fake_house()
    add(registry, "speculation", lambda config, context: None, requires={"backend.tree_attention"})
    config = attrs.evolve(config, speculation=NounConfig(name="mine"))
    check_components(found, registry, config, {}, None)
    assert kinds(told) == ["fail"]
    assert 'requires the capability "backend.tree_attention"' in told()[0][1]


def test_components_are_built_with_what_the_models_files_say(found, fake_house):
    seen = []
    config, registry = fake_house()
    add(registry, "observer", lambda config, context: seen.append(context) or Observer())
    config = attrs.evolve(config, observer=ObserverConfig(names=("mine",)))
    facts = ModelFacts(
        architecture="A",
        dtype="float32",
        vocab_size=11,
        max_model_len=64,
        eos_token_ids=(),
        num_parameters=1,
        weights_bytes=4,
        kv_bytes_per_token=8,
    )
    check_components(found, registry, config, {}, facts)
    (context,) = seen
    assert context.model.vocab_size == 11
    assert (context.limits.max_model_len, context.limits.num_blocks, context.limits.block_size) == (64, 512, 4)


def test_noun_without_a_component_is_not_looked_at_and_without_any_plugin_all_are_unknown(found, told, fake_house):
    config, registry = fake_house()
    for name in ("none", ""):
        check_components(found, registry, attrs.evolve(config, speculation=NounConfig(name=name)), {}, None)
    assert not [message for _, message in told() if message.startswith("speculation")]
    nothing = Findings()
    check_components(nothing, Registry.discover(entry_points=()), Config(), {}, None)
    assert {item.severity.value for item in nothing} == {"fail"}


@pytest.mark.parametrize(("required", "kind"), [(False, "warn"), (True, "fail")])
def test_store_that_cannot_be_used_is_doubtful_or_wrong_where_it_is_required(found, told, fake_house, required, kind):
    def refuse():
        raise TransferError("shelf://nowhere refuses.", cause="unreachable", hint="Start it.")

    check_components(found, *house_with_store(fake_house, refuse, required=required), {}, None)
    (item,) = (item for item in found if item.severity.value != "ok")
    assert item.severity.value == kind
    assert item.message.startswith("kv_connector: mine, active")
    assert item.message.endswith("but its store cannot be used (unreachable): shelf://nowhere refuses.")
    assert item.remedy.startswith("Start it. ")
    assert ("serving goes on without it." in item.remedy) is not required


def test_store_that_works_is_sound_and_nothing_is_left_in_it(found, told, fake_house):
    objects = {}
    check_components(found, *house_with_store(fake_house, lambda: DictStore(objects), required=True), {}, None)
    assert set(kinds(told)) == {"ok"}
    assert not objects


def house_with_store(fake_house, make_store, *, required):
    config, registry = fake_house()
    settings = StoreSettings(required=required)
    add(
        registry,
        "kv_connector",
        lambda config, context: store_connector(make_store, config, context, name="mine"),
        config=StoreSettings,
    )
    return registry, attrs.evolve(config, kv_connector=FixedNounConfig(name="mine", components={"mine": settings}))


def add(registry, noun, factory, **more):
    from support.nouns import HOOKS
    from trencadis.hookspecs import hookimpl

    component = Component(name="mine", factory=factory, summary="Mine.", interface_version=1, **more)
    body = {HOOKS[noun]: hookimpl(lambda self: [component], specname=HOOKS[noun])}
    registry.register(type("Mine", (), body)())


def test_policy_around_another_one_and_a_shadow_are_built_with_what_they_name(found, told):
    chosen = {"name": "fair_share", "shadow": "shortest_first"}
    resolved, registry = load_with_plugins(environ={}, overrides={"scheduling": chosen})
    check_components(found, registry, resolved.config, {}, None)
    assert set(kinds(told)) == {"ok"}
    built = [message.split(";")[0] for _, message in told() if message.startswith("scheduling")]
    assert built[:3] == [
        "scheduling: fair_share, active",
        "scheduling: fcfs, inner",
        "scheduling: shortest_first, shadow",
    ]


def test_stores_of_tiers_are_tried(found, told):
    chosen = {
        "kv_connector": {
            "name": "tiered",
            "tiered": {"children": ["host_offload", "filesystem"]},
            "filesystem": {"path": "/proc/nope"},
        }
    }
    resolved, registry = load_with_plugins(environ={}, overrides=chosen)
    check_components(found, registry, resolved.config, {}, None)
    (message,) = (message for kind, message in told() if kind == "warn")
    assert message.startswith("kv_connector: filesystem, inner")
    assert "The KV directory /proc/nope cannot be used" in message
