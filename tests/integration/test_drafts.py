"""Drafts that are always right, never right or anything between, and drafters that fail: the text is ever the same.

Only verified tokens reach connectors, the prefix cache and speculators. Failing parts in every combination: ``tests/core/engine/test_machine.py``;
each answer against a law: ``tests/core/engine/test_guard.py``.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

from support.core.invariants import broken_invariants
from support.strategies.guesses import PROMPT, request, right, wrong
from trencadis.interfaces import DraftView
from trencadis.records import Drafts, FinishReason
from trencadis_testing.doubles import LoopConnector, ScriptedSpeculator
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text

NUM_TOKENS = 41


def engine_of(speculator: Any, *, layout: str = "ragged", **options: Any) -> Any:
    return make_engine(backend=FakeBackend(eos=-1, layout=layout), speculator=speculator, num_blocks=128, **options)


def true_drafts(k: int) -> Any:
    return lambda tokens: fake_text(tokens.tolist(), k, eos=-1)


def false_drafts(k: int) -> Any:
    return lambda tokens: [(token + 1) % 97 for token in fake_text(tokens.tolist(), k, eos=-1)]


def guessed_drafts(k: int) -> Any:
    """Right so far and then wrong, a random number of them, none at times."""

    def draft(tokens: Any) -> list[int]:
        rng = random.Random(len(tokens))
        num_right = rng.randrange(k + 1)
        return [*fake_text(tokens.tolist(), num_right, eos=-1), *(rng.randrange(97) for _ in range(k - num_right))]

    return draft


@pytest.mark.parametrize("k", [1, 2, 3, 7, 16, 39])
def test_an_oracle_takes_one_step_for_each_k_and_one_tokens_and_an_anti_oracle_one_for_each(k: int) -> None:
    """The prefill yields the first token; a decode yields its drafts and one more."""
    for drafter, num_steps in ((true_drafts, -(-(NUM_TOKENS - 1) // (k + 1))), (false_drafts, NUM_TOKENS - 1)):
        engine = engine_of(ScriptedSpeculator(drafter(k), max_draft_tokens=k))
        engine.add(request("r", max_tokens=NUM_TOKENS))
        assert drain(engine)["r"].token_ids.tolist() == fake_text(PROMPT, NUM_TOKENS, eos=-1)
        assert engine.totals.num_steps - 1 == num_steps
        assert engine.totals.num_accepted_tokens == NUM_TOKENS - 1 - num_steps


@pytest.mark.parametrize("drafter", [true_drafts, false_drafts, guessed_drafts])
@pytest.mark.parametrize("layout", ["ragged", "padded", "unified"])
def test_text_is_the_model_s_whoever_drafts(drafter: Any, layout: str) -> None:
    """Chunked prefills beside decodes with drafts, in every batch layout."""
    for k, budget in ((1, 8), (3, 64), (7, 8)):
        speculator = ScriptedSpeculator(drafter(k), max_draft_tokens=k)
        engine = engine_of(speculator, layout=layout, max_num_batched_tokens=budget, max_num_seqs=4)
        for i in range(3):
            engine.add(request(str(i), (*PROMPT, i), max_tokens=NUM_TOKENS))
        ends = drain(engine)
        assert [ends[str(i)].token_ids.tolist() for i in range(3)] == [
            fake_text((*PROMPT, i), NUM_TOKENS, eos=-1) for i in range(3)
        ]


# ---------------------------------------------------------------------------------------------------------- failures


class Broken(ScriptedSpeculator):
    """Drafts rightly until it is broken in one way."""

    def __init__(self, way: str) -> None:
        super().__init__(right)
        self.way = way
        self.num_calls = 0
        self.is_closed = False

    def propose(self, view: DraftView) -> Drafts:
        self.num_calls += 1
        return self._fails("propose") if self.num_calls > 2 and self.way == "propose" else super().propose(view)

    def on_verified(self, **verdict: Any) -> None:
        if self.num_calls > 1:
            self._fails("on_verified")
        super().on_verified(**verdict)

    def on_finished(self, **end: Any) -> None:
        self._fails("on_finished")

    def close(self) -> None:
        self.is_closed = True

    def _fails(self, method: str) -> Any:
        if method == self.way:
            raise RuntimeError("boom")


@pytest.mark.representatives(3)
@pytest.mark.parametrize("way", ["propose", "on_verified", "on_finished"])
def test_a_speculator_that_fails_is_switched_off_and_requests_go_on(way: str, caplog: pytest.LogCaptureFixture) -> None:
    speculator = Broken(way)
    engine = engine_of(speculator)
    for name, length in (("first", 4), ("other", 40)):
        engine.add(request(name, max_tokens=length))
    for name, end in drain(engine).items():
        assert end.token_ids.tolist() == fake_text(PROMPT, 4 if name == "first" else 40, eos=-1)
        assert end.finish_reason is FinishReason.LENGTH
    assert engine.inspect().stages["speculation"].startswith("Broken raised")
    assert engine.totals.num_drafters_quarantined == 1
    assert speculator.is_closed
    (error,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "Broken raised" in error
    assert "Speculation goes off" in error
    engine.add(request("later", max_tokens=30))
    assert drain(engine)["later"].token_ids.tolist() == fake_text(PROMPT, 30, eos=-1)
    assert broken_invariants(engine) == []


# ---------------------------------------------------------------------------------------------------- verified tokens

DRAFTS = [right, wrong, lambda tokens: [*right(tokens)[:1], 3, 3]]


@pytest.mark.representatives(3)
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("place", ["connector", "prefix cache"])
def test_only_verified_tokens_are_saved_and_found(draft: Any, place: str) -> None:
    """A block is saved when its tokens are committed, so that who loads it has the very same text."""
    connector = LoopConnector()
    options = {} if place == "prefix cache" else {"connector": connector.pair(), "prefix_caching": False}
    engine = engine_of(ScriptedSpeculator(draft), **options)
    engine.add(request("a", max_tokens=18))
    longer = (*PROMPT, *drain(engine)["a"].token_ids.tolist())
    assert list(longer[len(PROMPT) :]) == fake_text(PROMPT, 18, eos=-1)
    assert len(connector.store.blocks) == (0 if place == "prefix cache" else (len(longer) - 1) // 4)
    engine.add(request("b", longer))
    end = drain(engine)["b"]
    assert end.token_ids.tolist() == fake_text(longer, 12, eos=-1)
    assert end.num_cached_tokens == (len(longer) - 1) // 4 * 4


@pytest.mark.parametrize("draft", DRAFTS[:2])
def test_a_connector_holds_no_block_that_only_drafts_were_given(draft: Any) -> None:
    connector = LoopConnector(holds=True)
    engine = engine_of(ScriptedSpeculator(draft), connector=connector.pair(), prefix_caching=False)
    on_finished, held = connector.scheduler.on_finished, []

    def counted(request: Any, *, blocks: Any) -> Any:
        held.append(len(blocks))
        return on_finished(request, blocks=blocks)

    connector.scheduler.on_finished = counted  # type: ignore[method-assign]
    engine.stage("transfer").transfers.connector.strategy = connector.scheduler
    for length in range(1, 9):
        engine.add(request(str(length), max_tokens=20))
        known = 0
        while known < 10 + length and engine.inspect().sequences:
            engine.step()
            known = len(engine._state.known_tokens(engine._state.table.sequence(0)))
        engine.stop(str(length))
        assert held[-1] <= -(-known // 4)
        drain(engine)
        assert engine.inspect().blocks.num_used == 0


def test_speculators_see_committed_tokens_only() -> None:
    seen: list[list[int]] = []

    class Watching(ScriptedSpeculator):
        def propose(self, view: DraftView) -> Drafts:
            seen.extend(tokens.tolist() for tokens in view.token_ids)
            return super().propose(view)

    engine = engine_of(Watching(wrong))
    engine.add(request("r"))
    drain(engine)
    whole = [*PROMPT, *fake_text(PROMPT, 12, eos=-1)]
    assert seen
    assert all(tokens == whole[: len(tokens)] for tokens in seen)
