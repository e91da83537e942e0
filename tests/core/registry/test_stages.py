"""Stages that plugins offer: their order, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from trencadis.errors import ComponentConflictError, ContractError
from trencadis.hookspecs import hookimpl
from trencadis.interfaces import StageDefinition
from trencadis.registry import Registry


def plugin(*definitions: Any, name: str = "given") -> Any:
    class Given:
        @hookimpl
        def trencadis_stages(self) -> list[Any]:
            return list(definitions)

    Given.__qualname__ = name
    return Given()


def stage(name: str, *before: str) -> StageDefinition:
    return StageDefinition(name=name, make=lambda _: None, summary="Does nothing.", before=before)


def names(registry: Registry) -> list[str]:
    return [one.definition.name for one in registry.stages]


def test_stages_come_before_those_that_they_name_and_else_by_name() -> None:
    registry = Registry.discover(
        entry_points=[], extra_plugins=[plugin(stage("b"), stage("a"), stage("z", "a", "absent"))]
    )
    assert names(registry) == ["b", "z", "a"]


def test_the_built_in_stages_act_in_the_order_of_their_work() -> None:
    order = names(Registry.discover())
    assert order.index("swap") < order.index("defragmenter") < order.index("transfer")


def test_stages_that_want_to_act_before_each_other_are_refused() -> None:
    with pytest.raises(ContractError, match=r'act before each other: ".*" before'):
        Registry.discover(entry_points=[], extra_plugins=[plugin(stage("a", "b"), stage("b", "a"))])


def test_one_name_is_one_stage() -> None:
    with pytest.raises(ContractError, match='yielded the stage "a" twice'):
        Registry.discover(entry_points=[], extra_plugins=[plugin(stage("a"), stage("a"))])
    with pytest.raises(ComponentConflictError, match="Two plugins offer one name"):
        Registry.discover(entry_points=[], extra_plugins=[plugin(stage("a")), plugin(stage("a"), name="other")])


def test_what_is_no_definition_is_refused() -> None:
    with pytest.raises(ContractError, match=r"yielded 5 from trencadis_stages, where a .*StageDefinition is expected"):
        Registry.discover(entry_points=[], extra_plugins=[plugin(5)])
