"""A configuration of stable components that loads today loads in later versions, and means the same."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from stable_options import FILE, broken_promises, options_of, stable_options
from trencadis.config import load_config
from trencadis.interfaces import setting
from trencadis.registry import Registry, resolve_plan

WHAT_TO_DO = (
    "A stable component keeps its options: keep one that is no longer used and ignore it, and give a new one a default: "
    "docs/why/stability.md."
)


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover()


@pytest.fixture(scope="module")
def frozen() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def test_no_stable_component_has_lost_or_changed_an_option(registry, frozen) -> None:
    present = stable_options(registry)
    missing = sorted(frozen.keys() - present.keys())
    assert not missing, f"{missing}: a stable component stays, and stays stable. {WHAT_TO_DO}"
    broken = [f"{name}: {one}" for name in frozen for one in broken_promises(frozen[name], present[name])]
    assert not broken, WHAT_TO_DO


def test_what_is_new_is_frozen_too(registry, frozen) -> None:
    present = stable_options(registry)
    new = [name for name in present if name not in frozen or present[name].keys() - frozen[name].keys()]
    assert not new, "run: python tools/stable_options.py"


def test_a_configuration_that_writes_out_every_frozen_option_loads_without_a_word(registry, frozen, caplog) -> None:
    values = {
        f"{name}.{key}": option["default"]
        for name, options in frozen.items()
        for key, option in options.items()
        if "default" in option
    }
    resolved = load_config(settings=registry.settings, environ={}, overrides=values)
    assert resolved.config == attrs.evolve(load_config(settings=registry.settings, environ={}).config)
    assert not caplog.messages


def test_defaults_of_the_configuration_need_no_leave(registry) -> None:
    plan = resolve_plan(load_config(settings=registry.settings, environ={}).config, registry)
    assert {choice.component.component.stability for _, choice in plan.named_choices()} <= {"stable", "provisional"}


@attrs.frozen(kw_only=True)
class BeforeConfig:
    limit: int = setting(3, "Most.")
    mode: str = setting("fast", "How.", validator=attrs.validators.in_(["fast", "slow"]))
    name: str = setting("x", "Who.")


def after(**fields: Any) -> type[Any]:
    kept = {field.name: field for field in attrs.fields(BeforeConfig)}
    made = {"limit": int, "mode": str, "name": str} | {
        name: kind for name, (kind, _) in fields.items() if kind is not None
    }
    declared = {
        name: fields[name][1]
        if name in fields
        else setting(kept[name].default, "As before.", validator=kept[name].validator)
        for name in made
        if fields.get(name, (1,))[0] is not None
    }
    built = attrs.make_class("AfterConfig", declared, frozen=True, kw_only=True)
    built.__annotations__ = {name: made[name] for name in declared}
    return built


@pytest.mark.representatives(1000)
@pytest.mark.parametrize(
    ("fields", "broken"),
    [
        ({}, []),
        ({"more": (int, setting(1, "New."))}, []),
        ({"mode": (str, setting("fast", "How.", validator=attrs.validators.in_(["fast", "slow", "odd"])))}, []),
        ({"more": (int, setting(attrs.NOTHING, "New."))}, ["more is new and has no default"]),
        ({"limit": (None, None)}, ["limit was removed"]),
        ({"limit": (int, setting(4, "Most."))}, ["limit: default was 3 and is 4"]),
        ({"limit": (float, setting(3, "Most."))}, ["limit: type was 'a whole number' and is 'a number'"]),
        ({"limit": (int, setting(attrs.NOTHING, "Most."))}, ["limit: default was 3 and is 'none'"]),
        (
            {"mode": (str, setting("fast", "How.", validator=attrs.validators.in_(["fast"])))},
            ["mode no longer takes 'slow'"],
        ),
        (
            {"name": (str, setting("x", "Who.", validator=attrs.validators.in_(["x"])))},
            ["name takes only x, and took any text"],
        ),
    ],
)
def test_what_breaks_the_promise_is_found_and_what_keeps_it_is_not(fields, broken) -> None:
    assert broken_promises(options_of(BeforeConfig), options_of(after(**fields))) == broken
