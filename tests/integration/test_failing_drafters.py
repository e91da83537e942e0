"""Speculators and draft lengths that fail in every way: speculation goes off, and requests go on."""

from __future__ import annotations

import logging
from typing import Any

import attrs
import numpy as np
import pytest

from support.core.invariants import broken_invariants
from support.strategies.guesses import PROMPT, request, right
from trencadis.interfaces import DraftView, LengthView, VerifiedStep
from trencadis.records import Drafts, FinishReason
from trencadis_testing.doubles import AsManyAsMay, ScriptedSpeculator
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text


class Broken(ScriptedSpeculator):
    """Drafts rightly until it is broken in one way."""

    def __init__(self, way: str) -> None:
        super().__init__(right)
        self.way = way
        self.num_calls = 0
        self.is_closed = False

    def propose(self, view: DraftView) -> Drafts:
        self.num_calls += 1
        drafts = super().propose(view)
        if self.num_calls < 3:
            return drafts
        match self.way:
            case "raises":
                raise RuntimeError("boom")
            case "too many":
                return Drafts(num_drafts=drafts.num_drafts + 9, token_ids=np.repeat(drafts.token_ids, 9))
            case "negative":
                return Drafts(num_drafts=drafts.num_drafts * 0 - 1, token_ids=drafts.token_ids[:0])
            case "miscounted":
                return attrs.evolve(drafts, token_ids=drafts.token_ids[:-1])
            case "a tree":
                return attrs.evolve(drafts, parents=np.full(len(drafts.token_ids), -1, np.int32))
            case "nothing":
                return None  # type: ignore[return-value]
        return drafts

    def on_verified(self, **verdict: Any) -> None:
        if self.way == "cannot be told" and self.num_calls > 1:
            raise RuntimeError("boom")
        super().on_verified(**verdict)

    def on_finished(self, **end: Any) -> None:
        if self.way == "cannot end":
            raise RuntimeError("boom")

    def close(self) -> None:
        self.is_closed = True


WAYS = ["raises", "too many", "negative", "miscounted", "a tree", "nothing", "cannot be told", "cannot end"]


@pytest.mark.parametrize("way", WAYS)
def test_a_speculator_that_fails_is_switched_off_and_requests_go_on(way: str, caplog: pytest.LogCaptureFixture) -> None:
    speculator = Broken(way)
    engine = make_engine(backend=FakeBackend(eos=-1), speculator=speculator)
    for name, length in (("first", 4), ("other", 40)):
        engine.add(request(name, max_tokens=length))
    ends = drain(engine)
    assert {name: end.token_ids.tolist() for name, end in ends.items()} == {
        "first": fake_text(PROMPT, 4, eos=-1),
        "other": fake_text(PROMPT, 40, eos=-1),
    }
    assert {end.finish_reason for end in ends.values()} == {FinishReason.LENGTH}
    assert engine._scheduler.drafting.fault.startswith("Broken raised")
    assert engine.totals.num_drafters_quarantined == 1
    assert speculator.is_closed
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "Broken raised" in errors[0]
    assert "Speculation goes off" in errors[0]


def test_an_engine_whose_speculator_failed_takes_new_requests() -> None:
    engine = make_engine(backend=FakeBackend(eos=-1), speculator=Broken("raises"))
    for name in ("one", "two", "three"):
        engine.add(request(name, max_tokens=30))
        assert drain(engine)[name].token_ids.tolist() == fake_text(PROMPT, 30, eos=-1)
        assert broken_invariants(engine) == []
    engine.close()


class BrokenLength(AsManyAsMay):
    def __init__(self, way: str) -> None:
        self.way = way

    def choose(self, view: LengthView) -> Any:
        match self.way:
            case "raises":
                raise RuntimeError("boom")
            case "too many":
                return view.max_draft_tokens + 1
            case "negative":
                return view.max_draft_tokens * 0 - 1
            case "one for all":
                return np.ones(7, np.int32)
        return view.max_draft_tokens

    def on_verified(self, step: VerifiedStep) -> None:
        if self.way == "cannot be told":
            raise RuntimeError("boom")

    def on_finished(self, *, slot: int) -> None:
        if self.way == "cannot end":
            raise RuntimeError("boom")


@pytest.mark.parametrize("way", ["raises", "too many", "negative", "one for all", "cannot be told", "cannot end"])
def test_a_draft_length_that_fails_is_switched_off_and_requests_go_on(way: str) -> None:
    engine = make_engine(
        backend=FakeBackend(eos=-1), speculator=ScriptedSpeculator(right), draft_length=BrokenLength(way)
    )
    engine.add(request("r"))
    engine.add(request("s", max_tokens=20))
    ends = drain(engine)
    assert ends["r"].token_ids.tolist() == fake_text(PROMPT, 12, eos=-1)
    assert ends["s"].token_ids.tolist() == fake_text(PROMPT, 20, eos=-1)
    assert engine._scheduler.drafting.fault.startswith("BrokenLength raised")
