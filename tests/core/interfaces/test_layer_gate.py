"""The gate of a step is there only if a layer waits, asks within one budget, and lets nothing out that a connector raises."""

from __future__ import annotations

from typing import Any

import pytest

from trencadis.interfaces import LayerGate
from trencadis_testing.doubles import LoopConnector


class Asked:
    """A worker side, as far as a gate knows it."""

    def __init__(self, *, wants: bool = True, came: bool = True) -> None:
        self.wants_layers = wants
        self.came = came
        self.budgets: list[float] = []

    def wait_layer(self, layer: int, *, budget_s: float) -> bool:
        self.budgets.append(budget_s)
        return self.came


class Raising:
    """One whose every word is an error."""

    @property
    def wants_layers(self) -> bool:
        raise RuntimeError("wants_layers")

    def wait_layer(self, layer: int, *, budget_s: float) -> bool:
        raise RuntimeError("wait_layer")


def gate_of(connector: Any, *, budget_s: float = 5.0) -> LayerGate | None:
    return LayerGate.of(connector, budget_s=budget_s)


@pytest.mark.parametrize("connector", [None, Asked(wants=False), Raising(), LoopConnector().worker])
def test_step_in_which_nobody_waits_has_no_gate(connector: Any) -> None:
    assert gate_of(connector) is None


def test_layers_share_one_budget() -> None:
    asked = Asked()
    gate = gate_of(asked)
    assert gate is not None
    for layer in range(3):
        gate.wait(layer)
    assert gate.is_whole
    assert 5.0 >= asked.budgets[0] >= asked.budgets[1] >= asked.budgets[2] > 0.0


def test_budget_that_is_used_up_is_none() -> None:
    asked = Asked()
    gate = gate_of(asked, budget_s=0.0)
    assert gate is not None
    gate.wait(0)
    assert asked.budgets == [0.0]


def test_one_layer_that_did_not_come_is_remembered() -> None:
    asked = Asked(came=False)
    gate = gate_of(asked)
    assert gate is not None
    gate.wait(0)
    asked.came = True
    gate.wait(1)
    assert not gate.is_whole


def test_connector_that_raises_has_not_brought_the_layer() -> None:
    asked: Any = Asked()
    gate = gate_of(asked)
    assert gate is not None
    asked.wait_layer = Raising().wait_layer
    gate.wait(0)
    assert not gate.is_whole
