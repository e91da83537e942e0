from __future__ import annotations

from typing import Any

import pytest

from trencadis.errors import ConfigValueError, ImportPathRefusedError, UnknownComponentError, UnknownKeyError
from trencadis.registry import load_with_plugins, resolve_plan
from trencadis.switching import SchedulingChange, SchedulingInForce, change_table, resolve_change


def at_start(**scheduling: Any) -> tuple[SchedulingInForce, Any]:
    resolved, registry = load_with_plugins(environ={}, overrides={"scheduling": scheduling})
    return SchedulingInForce.at_start(resolved.config, resolve_plan(resolved.config, registry)), registry


def after(present: SchedulingInForce, registry: Any, **table: Any) -> SchedulingInForce:
    return resolve_change(present, registry, SchedulingChange.of(table, source="a test"))


@pytest.mark.parametrize(
    "target",
    [
        {"name": "priority"},
        {"name": "fair_share", "shadow": "fcfs"},
        {"name": "fcfs", "shadow": "fair_share"},
        {"name": "fair_share", "shadow": "fair_share"},
    ],
)
def test_the_hash_is_that_of_a_configuration_that_says_the_same_by_whatever_way(target: dict[str, str]):
    tables = {"fallback": "fcfs", "fair_share": {"inner": "priority"}, "priority": {"age_s": 3.0}}
    present, registry = at_start(**tables, name="deadline", shadow="multi_level")
    wanted, _ = at_start(**tables, **target)
    for way in (
        [{"name": "fair_share", "options": {"inner": "fcfs"}}],
        [{"shadow": "fair_share"}, {"name": "fcfs"}],
        [],
    ):
        now = present
        for table in (*way, {"shadow": None, **target}):
            now = after(now, registry, **table)
        assert now.plan.plan_hash == wanted.plan.plan_hash
        assert now.plan.choices.keys() == wanted.plan.choices.keys()


def test_a_shadow_has_the_written_options_also_if_it_is_the_policy_with_others():
    present, registry = at_start(name="fcfs", fcfs={"victim": "cheapest"})
    now = after(present, registry, name="fcfs", options={"victim": "youngest"}, shadow="fcfs")
    assert now.plan.choices["scheduling"].options.victim == "youngest"
    assert now.plan.shadow is not None
    assert now.plan.shadow.options.victim == "cheapest"


def test_caps_of_tenants_are_no_hindrance():
    present, registry = at_start(name="fcfs", tenants={"ann": {"weight": 2.0, "max_waiting": 3}})
    assert after(present, registry, name="fair_share").plan.choices["scheduling"].component.name == "fair_share"


def test_options_of_an_import_path_are_its_own():
    path = "trencadis_testing.engines:ServeInOrder"
    present, registry = at_start(name=path, options={"a": 1})
    assert after(present, registry, options={"a": 2}).plan.choices["scheduling"].options == {"a": 2}
    gone = after(present, registry, name="fcfs")
    assert gone.plan.choices["scheduling"].component.name == "fcfs"
    assert after(gone, registry, name=path).plan.choices["scheduling"].options == {"a": 1}


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        ({"name": "none"}, UnknownComponentError, 'name = "none" \\(from a test\\)'),
        ({"name": ""}, UnknownComponentError, 'name = ""'),
        ({"shadow": "x"}, UnknownComponentError, 'shadow = "x" \\(from a test\\)'),
        ({"name": "fair_share", "options": {"inner": "x"}}, UnknownComponentError, 'inner = "x"'),
        ({"name": "fair_share", "options": {"inner": "fair_share"}}, ConfigValueError, "within itself"),
        ({"name": "fcfs", "options": {"x": 1}}, UnknownKeyError, r"\[scheduling.fcfs\] x \(from a test\): no such key"),
        ({"options": []}, ConfigValueError, "options = \\[\\] \\(from a test\\): must be a table"),
        ({"shadow": 1}, ConfigValueError, "must be text, or none"),
        ({"polciy": "fcfs"}, UnknownKeyError, "polciy"),
        ({}, ConfigValueError, "nothing to change"),
    ],
)
def test_a_mistake_is_named_as_one_in_a_file_is(table: dict[str, Any], error: type[Exception], message: str):
    present, registry = at_start(name="fcfs")
    with pytest.raises(error, match=message):
        after(present, registry, **table)


def test_arguments_left_out_are_left_out_of_the_table():
    assert change_table(None, None, ...) == {}
    assert change_table("fcfs", {}, None) == {"name": "fcfs", "options": {}, "shadow": None}


SERVE = "trencadis_testing.engines:ServeInOrder"


@pytest.mark.parametrize(
    "table",
    [
        {"name": "os:system"},
        {"name": "os:system", "options": {"command": "true"}},
        {"shadow": "os:system"},
        {"name": "shortest_first", "options": {"predictor": "os:system"}},
        {"name": "fair_share", "options": {"inner": "os:system"}},
        {"name": "fair_share", "options": {"inner": SERVE}},
        {"name": SERVE},
        {"name": "fcfs", "shadow": SERVE},
    ],
    ids=str,
)
def test_no_import_path_of_a_client_is_followed(table: dict[str, Any]):
    present, registry = at_start(name="fcfs")
    with pytest.raises(ImportPathRefusedError, match=r"\(from a test\): it would import"):
        after(present, registry, **table)


def test_a_client_may_name_again_what_the_operator_has_named():
    present, registry = at_start(name=SERVE, shadow="fcfs")
    gone = after(present, registry, name="fcfs", shadow=SERVE)
    assert after(gone, registry, name=SERVE).name == SERVE
    with pytest.raises(ImportPathRefusedError):
        after(gone, registry, name="trencadis_testing.engines:Other")


def test_what_the_operators_code_put_in_force_stays_when_a_client_changes_something_else():
    present, registry = at_start(name="fcfs")
    table = {"name": "shortest_first", "options": {"predictor": "json:loads"}}
    code = SchedulingChange.of(table, source="set_scheduling", may_import=True)
    now = after(resolve_change(present, registry, code), registry, shadow="fcfs")
    assert now.plan.choices["scheduling"].options.predictor == "json:loads"
    with pytest.raises(ImportPathRefusedError):
        after(now, registry, options={"predictor": "json:dumps"})
