from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.strategies.guesses import PROMPT, request, right
from trencadis.engine.stage import Stage
from trencadis.interfaces import StageDefinition
from trencadis.records import Drafts, TokenDeltas
from trencadis_stages.speculation.counts import draft_stats
from trencadis_testing.doubles import ScriptedSpeculator
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_chains_are_counted_by_the_drafts_before_each() -> None:
    assert draft_stats(Drafts(num_drafts=ints(3, 0, 1), token_ids=ints(5, 6, 7, 8)), ints(2, 0, 0)) == {
        "num_drafted_sequences": 2,
        "num_draft_tokens": 4,
        "num_accepted_tokens": 2,
        "num_drafted_by_position": (2, 1, 1),
        "num_accepted_by_position": (1, 1, 0),
    }


def test_trees_are_counted_by_depth() -> None:
    """Two children of the newest token, of which the second has two of its own and one of these another; and a chain."""
    drafts = Drafts(num_drafts=ints(5, 2), token_ids=ints(1, 2, 3, 4, 5, 6, 7), parents=ints(-1, -1, 1, 1, 3, -1, 0))
    found = draft_stats(drafts, ints(3, 1))
    assert (found["num_drafted_by_position"], found["num_accepted_by_position"]) == ((3, 3, 1), (2, 1, 1))


@pytest.mark.parametrize("seed", range(5))
def test_depths_are_those_of_a_walk_from_each_draft(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 9, 6).astype(np.int32)
    parents = [int(rng.integers(-1, i)) for count in counts for i in range(count)]
    depths, first = [], 0
    for count in counts.tolist():
        mine: list[int] = []
        for i in range(count):
            parent = parents[first + i]
            mine.append(0 if parent < 0 else mine[parent] + 1)
        depths += mine
        first += count
    drafts = Drafts(num_drafts=counts, token_ids=ints(*range(len(parents))), parents=ints(*parents))
    assert draft_stats(drafts, np.zeros(6, np.int32))["num_drafted_by_position"] == tuple(np.bincount(depths).tolist())


def test_totals_are_sums_by_position_of_all_steps() -> None:
    """Three drafts in the first step, all of them right, and two in the last, after which one token is left."""
    engine = make_engine(backend=FakeBackend(eos=-1), speculator=ScriptedSpeculator(right), async_scheduling=False)
    engine.add(request("r", max_tokens=8))
    drain(engine)
    totals = engine.answer("totals", {})
    assert totals["num_drafted_by_position"] == totals["num_accepted_by_position"] == (2, 2, 1)
    assert (totals["num_drafted_sequences"], totals["num_draft_tokens"], totals["num_accepted_tokens"]) == (2, 5, 5)


def test_drafts_after_the_end_of_their_sequence_are_no_emitted_ones() -> None:
    text = fake_text(PROMPT, 4, eos=-1)
    engine = make_engine(backend=FakeBackend(eos=-1), speculator=ScriptedSpeculator(right), async_scheduling=False)
    engine.add(request("r", stop_token_ids=(text[2],)))
    assert drain(engine)["r"].token_ids.tolist() == text[:3]
    assert (engine.totals.num_draft_tokens, engine.totals.num_accepted_by_position) == (3, (1, 1, 0))


def test_a_guarded_stage_is_not_blamed_for_the_counts_of_drafts() -> None:
    class Looks(Stage):
        def after_step(self, step: Any, output: Any, deltas: TokenDeltas) -> TokenDeltas:
            return deltas

    looks = StageDefinition(name="looks", make=lambda _: Looks(), summary="Looks at steps.", before={"z"})
    last = StageDefinition(name="z", make=lambda _: Looks(), summary="Looks last.")
    engine = make_engine(backend=FakeBackend(eos=-1), speculator=ScriptedSpeculator(right), stages=[looks, last])
    engine.add(request("r"))
    drain(engine)
    assert engine.stage("looks").num_faults == engine.stage("z").num_faults == 0
    assert engine.totals.num_accepted_by_position == engine.totals.num_drafted_by_position != ()


def test_without_speculation_nothing_is_called_for_it_and_its_totals_are_there() -> None:
    engine = make_engine()
    assert engine._scheduler.propose is None
    assert all(stage.name != "speculation" for stage in engine._stages.all)
    assert engine.answer("totals", {})["drafter"] == ""
    assert engine.totals.num_drafted_by_position == ()
