"""What is refused at the start under which layout: the table, and the check that reads it."""

from __future__ import annotations

import functools
from typing import Any

import attrs
import pytest

from trencadis.config import Config
from trencadis.errors import CapabilityError, ConfigValueError
from trencadis.registry import ResolvedPlan, load_with_plugins, resolve_plan
from trencadis.registry.layout_support import FEATURES, LAYOUTS, check_layout, unserved_layout

PROCESSES = {"executor.name": "processes"}


@functools.cache
def _resolved(pairs: tuple[tuple[str, Any], ...]) -> tuple[Config, ResolvedPlan]:
    resolved, registry = load_with_plugins(environ={}, overrides=dict(pairs))
    return resolved.config, resolve_plan(resolved.config, registry)


def resolved(**overrides: Any) -> tuple[Config, ResolvedPlan]:
    return _resolved(tuple({name.replace("__", "."): value for name, value in overrides.items()}.items()))


def providing(plan: ResolvedPlan, noun: str, *names: str) -> ResolvedPlan:
    """Return a plan whose component of a noun provides more."""
    choice = plan.choices[noun]
    item = attrs.evolve(choice.component, component=attrs.evolve(choice.component.component, provides=frozenset(names)))
    return attrs.evolve(plan, choices={**plan.choices, noun: attrs.evolve(choice, component=item)})


def test_defaults_and_one_rank_in_a_process_and_two_ranks_are_served() -> None:
    check_layout(*resolved())
    check_layout(*resolved(**PROCESSES))
    check_layout(*resolved(**PROCESSES, parallel__tensor=2))


def test_ranks_need_an_executor_that_hosts_them() -> None:
    with pytest.raises(
        CapabilityError,
        match=r'^\[parallel\] tensor = 2 \(from argument\): executor component "inline".* "executor\.ranks"\.',
    ) as caught:
        check_layout(*resolved(executor__name="inline", parallel__tensor=2))
    assert caught.value.hint == 'Leave executor.name at "auto", or set it to "processes".'


@pytest.mark.parametrize("name", ["tensor", "pipeline"])
def test_several_ranks_have_an_executor_that_hosts_them_unless_another_is_named(name: str) -> None:
    config, plan = resolved(**{f"parallel__{name}": 2})
    check_layout(config, plan)
    assert plan.choices["executor"].component.name == "processes"
    assert resolved()[1].choices["executor"].component.name == "inline"


def test_what_is_said_about_stages_without_a_host_mends_it() -> None:
    with pytest.raises(CapabilityError) as caught:
        check_layout(*resolved(executor__name="inline", parallel__pipeline=2))
    assert caught.value.hint == 'Leave executor.name at "auto", or set it to "processes".'


@pytest.mark.parametrize("name", ["pipeline", "expert"])
def test_other_divisions_need_a_backend_that_provides_them(name: str) -> None:
    config, plan = resolved(**PROCESSES, parallel__tensor=2, **{f"parallel.{name}": 2})
    message = (
        rf'^\[parallel\] {name} = 2 \(from argument\): backend component "torch".* does not provide "backend\.{name}"\.'
    )
    with pytest.raises(CapabilityError, match=message) as caught:
        check_layout(config, providing(plan, "backend"))
    assert caught.value.hint
    check_layout(config, providing(plan, "backend", f"backend.{name}"))


def test_the_backend_torch_divides_experts_and_layers() -> None:
    check_layout(*resolved(**PROCESSES, parallel__tensor=2, parallel__expert=2))
    check_layout(*resolved(**PROCESSES, parallel__pipeline=2))


def test_copies_go_with_everything_that_one_engine_does() -> None:
    def check(**overrides: Any) -> None:
        config, plan = resolved(**overrides)
        check_layout(attrs.evolve(config, parallel=attrs.evolve(config.parallel, data=2)), plan)

    check()
    check(**PROCESSES, parallel__tensor=2)
    check(**PROCESSES, kv_connector__name="host_offload")
    with pytest.raises(CapabilityError, match=r"^\[kv_connector\]"):
        check(**PROCESSES, kv_connector__name="p2p")


def test_experts_go_over_one_rank_or_all_of_a_stage() -> None:
    with pytest.raises(ConfigValueError, match=r"expert = 3 \(from argument\) with tensor = 2"):
        check_layout(*resolved(parallel__tensor=2, parallel__expert=3))


DATA = {**PROCESSES, "parallel__attention": "data", "engine__max_num_seqs": 8}


def test_ranks_may_have_the_attention_of_their_own_sequences_beside_whole_experts() -> None:
    check_layout(*resolved(**DATA, parallel__tensor=4, parallel__expert=4))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"parallel__tensor": 2}, r'attention = "data" \(from argument\) with tensor = 2 and expert = 1'),
        ({}, r'attention = "data" \(from argument\) with tensor = 1 and expert = 1'),
        (
            {"parallel__tensor": 2, "parallel__expert": 2, "parallel__pipeline": 2},
            r'attention = "data" \(from argument\) with pipeline = 2',
        ),
        (
            {"parallel__tensor": 3, "parallel__expert": 3},
            r"max_num_seqs = 8 \(from argument\) with .*no multiple of the 3 ranks",
        ),
        (
            {"parallel__tensor": 2, "parallel__expert": 2, "kv_connector__name": "host_offload"},
            r"^\[kv_connector\].*blocks of other sequences",
        ),
    ],
)
def test_what_does_not_go_with_attention_of_own_sequences_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises((CapabilityError, ConfigValueError), match=message) as caught:
        check_layout(*resolved(**DATA, **overrides))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        *(
            (
                {"kv_connector.name": name, **more},
                rf'^\[kv_connector\] name = kv_connector component "{refused}".*do not run in the processes of ranks',
            )
            for name, refused, more in (
                ("p2p", "p2p", {}),
                ("nixl", "nixl", {}),
                ("lmcache", "lmcache", {"plugins.experimental": True}),
                ("blend", "blend", {}),
                ("tiered", "p2p", {"kv_connector.tiered.children": ("host_offload", "p2p")}),
            )
        ),
    ],
)
def test_what_does_not_go_with_ranks_in_processes_is_refused_and_goes_without(
    overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(CapabilityError, match=message) as caught:
        check_layout(*resolved(**PROCESSES, **overrides))
    assert caught.value.hint
    check_layout(*resolved(**{name: value for name, value in overrides.items() if name != "parallel.tensor"}))


@pytest.mark.parametrize("name", ["filesystem", "host_offload", "mooncake", "redis", "tiered"])
def test_connectors_whose_worker_sides_can_be_elsewhere_go_with_every_layout(name: str) -> None:
    for layout in (
        {},
        {"parallel__tensor": 2},
        {"parallel__pipeline": 2},
        {"parallel__tensor": 2, "parallel__expert": 2},
    ):
        check_layout(*resolved(**PROCESSES, kv_connector__name=name, **layout))


def test_each_setting_of_the_table_is_one_and_its_default_asks_for_nothing_that_is_refused() -> None:
    config, names = Config(), {one.name for one in LAYOUTS}
    for feature in FEATURES:
        assert feature.refused.keys() <= names
        if feature.setting:
            table, key = feature.setting.split(".")
            value = getattr(getattr(config, table), key)
            assert not (feature.refused and feature.is_asked(value)), feature.name
            assert bool(feature.refused) == bool(feature.remedy)
        else:
            assert not feature.refused, "nothing in the configuration asks for it, so that the start cannot refuse it"


def test_only_the_components_of_named_nouns_are_asked() -> None:
    _, plan = resolved()
    assert "executor.ranks" in unserved_layout(plan, "pipeline", 2)
    alone = providing(plan, "backend")
    assert "backend.pipeline" in unserved_layout(alone, "pipeline", 2, nouns=("backend",))
    assert unserved_layout(plan, "pipeline", 1) == unserved_layout(plan, "data", 1) == ""
    assert unserved_layout(providing(plan, "backend", "backend.pipeline"), "pipeline", 2, nouns=("backend",)) == ""
