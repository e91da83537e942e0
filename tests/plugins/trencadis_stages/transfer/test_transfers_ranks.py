"""Loads of several ranks, each of which brings a share."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from support.core.invariants import broken_invariants
from support.kv.transfer_engines import ends_well, engine_on, waiting_for_kv
from support.kv.wild_connector import WildConnector
from trencadis.clock import SimulatedClock
from trencadis.engine.engine import Engine
from trencadis.records import ConnectorReport, FailedLoad, StepOutput
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend


@pytest.fixture
def wild() -> WildConnector:
    return WildConnector()


class TwoRanks(FakeExecutor):
    """What rank 0 reports is the connector's; what rank 1 does, the test says. Both write to one cache: a share is a block."""

    num_ranks = 2

    def __init__(self, backend: FakeBackend) -> None:
        super().__init__(backend)
        self.second = ConnectorReport()

    def submit(self, batch: Any) -> Any:
        output = super().submit(batch).wait()
        reports = {**output.connector_reports, 1: self.second}
        self.second = ConnectorReport()
        return FinishedStep(attrs.evolve(output, connector_reports=reports))


class FinishedStep:
    def __init__(self, output: StepOutput) -> None:
        self.output = output

    def wait(self) -> StepOutput:
        return self.output


def engine_on_two_ranks(wild: WildConnector) -> tuple[Engine, TwoRanks]:
    """Return an engine of two ranks that finds its prompts in the connector."""
    engine_on(wild)
    executor = TwoRanks(FakeBackend(eos=-1))
    engine = make_engine(connector=wild.pair(), executor=executor, clock=SimulatedClock(), prefix_caching=False)
    return engine, executor


def test_sequence_waits_until_every_rank_has_loaded_its_share(wild: WildConnector) -> None:
    engine, executor = engine_on_two_ranks(wild)
    transfer_id = waiting_for_kv(engine, wild)
    wild.arrive(transfer_id)
    for _ in range(3):
        engine.step()
    assert len(engine.inspect().stages["transfer"].waiting) == 1
    executor.second = ConnectorReport(loaded=(transfer_id,))
    assert ends_well(engine).num_cached_tokens == 16


def test_what_one_rank_lacks_is_computed_on_all(wild: WildConnector) -> None:
    engine, executor = engine_on_two_ranks(wild)
    transfer_id = waiting_for_kv(engine, wild)
    executor.second = ConnectorReport(
        failed=(FailedLoad(transfer_id=transfer_id, num_valid_tokens=8, cause="evicted"),)
    )
    engine.step()
    assert len(engine.inspect().stages["transfer"].waiting) == 1, "rank 0 still writes"
    wild.arrive(transfer_id)
    assert ends_well(engine).num_cached_tokens == 8
    assert engine.stage("transfer").transfers.num_failed_loads == 1


def test_blocks_of_a_load_given_up_stay_held_until_every_rank_has_let_go(wild: WildConnector) -> None:
    engine, executor = engine_on_two_ranks(wild)
    transfer_id = waiting_for_kv(engine, wild)
    engine.abort("r")
    engine.step()
    wild.release(transfer_id)
    for _ in range(3):
        engine.step()
    assert engine.inspect().stages["transfer"].num_pinned_blocks == 4
    executor.second = ConnectorReport(released=(transfer_id,))
    drain(engine)
    assert engine.inspect().stages["transfer"].num_pinned_blocks == 0
    assert broken_invariants(engine) == []
