"""Drafts that break the contract, and what a speculator that takes over may be."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest

from trencadis.engine.stage import Made
from trencadis.errors import ContractError, StepFailedError
from trencadis.interfaces import LengthView, Speculator, VerifiedStep
from trencadis.records import BucketLimits, Drafts, Request, SamplingParams
from trencadis_stages.speculation.guarded_speculator import GuardedSpeculator
from trencadis_testing.doubles import AsManyAsMay, ScriptedSpeculator
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend, fake_text
from trencadis_testing.speculation import draft_view

LIMITS = BucketLimits(
    block_size=4,
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_prefill_batch_size=1,
    num_blocks=16,
    contiguous=False,
    prefix_caching=True,
    max_draft_tokens=3,
)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Giving(Speculator):
    """Returns what it is given, or raises it."""

    max_draft_tokens = 3
    kv_bytes_per_token = 0  # type: ignore[assignment]

    def __init__(self, drafts: Any, **attributes: Any) -> None:
        self.drafts = drafts
        self.limits: list[BucketLimits] = []
        self.is_closed = False
        for name, value in attributes.items():
            setattr(self, name, value)

    def allocate(self, limits: BucketLimits) -> None:
        self.limits.append(limits)

    def propose(self, view: Any) -> Drafts:
        if isinstance(self.drafts, Exception):
            raise self.drafts
        found: Drafts = self.drafts
        return found

    def close(self) -> None:
        self.is_closed = True


GOOD = Drafts(num_drafts=ints(2, 0), token_ids=ints(5, 6))
TREE = Drafts(num_drafts=ints(2, 1), token_ids=ints(5, 6, 7), parents=ints(-1, -1, -1))
VIEW = draft_view([[1, 2], [3]], most=[2, 1])


def test_what_keeps_the_contract_passes() -> None:
    assert GuardedSpeculator("mine", Giving(GOOD)).ask.propose(VIEW) is GOOD
    assert GuardedSpeculator("mine", Giving(TREE, drafts_trees=True)).ask.propose(VIEW) is TREE
    chain = attrs.evolve(GOOD, parents=ints(-1, 0))
    assert (
        GuardedSpeculator("mine", Giving(chain)).ask.propose(draft_view([[1], [2]], most=2, linear_only=True)) is chain
    )


@pytest.mark.parametrize("token", [-1, 97])
def test_tokens_that_the_model_does_not_know_are_refused(token: int) -> None:
    drafts = attrs.evolve(GOOD, token_ids=ints(5, token))
    guarded = GuardedSpeculator("mine", Giving(drafts), vocab_size=97)
    with pytest.raises(StepFailedError, match=rf"it drafted tokens \[5, {token}\], the model knows 0 to 96"):
        guarded.ask.propose(VIEW)


def test_an_engine_knows_how_many_tokens_its_model_knows() -> None:
    engine = make_engine(speculator=Giving(Drafts(num_drafts=ints(1), token_ids=ints(97))))
    engine.add(Request(request_id="a", prompt_token_ids=(1, 2, 3), params=SamplingParams(max_tokens=4)))
    ended = drain(engine)
    assert len(ended["a"].token_ids) == 4
    assert engine.totals.num_drafters_quarantined == 1


def test_a_tree_that_was_not_announced_is_refused() -> None:
    with pytest.raises(StepFailedError, match="a tree where drafts must be linear"):
        GuardedSpeculator("mine", Giving(TREE)).ask.propose(VIEW)


def test_a_fallback_takes_over_with_the_sizes_and_the_failed_one_is_closed() -> None:
    broken, spare = Giving(RuntimeError("boom")), Giving(GOOD)
    guarded = GuardedSpeculator("mine", broken, lambda: spare)
    guarded.allocate(LIMITS)
    assert guarded.ask.propose(VIEW) is GOOD
    assert broken.is_closed
    assert spare.limits == [LIMITS]
    assert (guarded.label, guarded.num_quarantined) == ("fallback of mine", 1)


def test_a_fallback_that_fails_too_is_the_end() -> None:
    guarded = GuardedSpeculator("mine", Giving(RuntimeError("boom")), lambda: Giving(ValueError("bang")))
    with pytest.raises(StepFailedError, match="fallback of mine raised ValueError: bang"):
        guarded.ask.propose(VIEW)


def test_a_fallback_has_no_more_room_than_was_made() -> None:
    guarded = GuardedSpeculator("mine", Giving(RuntimeError("boom")), lambda: Giving(GOOD, kv_bytes_per_token=64))
    with pytest.raises(StepFailedError, match="keeps 64 bytes for each token, and room was made for 0"):
        guarded.ask.propose(VIEW)


NUMBERS = [
    ("max_draft_tokens", 2.5, "1 on"),
    ("max_draft_tokens", 0, "1 on"),
    ("kv_bytes_per_token", -1, "0 on"),
    ("kv_bytes_per_token", None, "0 on"),
]


@pytest.mark.parametrize(("name", "number", "says"), NUMBERS)
def test_numbers_that_room_cannot_be_made_by_are_refused(name: str, number: Any, says: str) -> None:
    says = f"mine has {name} = {number}, which must be a whole number from {says}"
    with pytest.raises(ContractError, match=says):
        GuardedSpeculator("mine", Giving(GOOD, **{name: number}))
    with pytest.raises(ContractError, match=f"Giving has {name} = {number}, "):
        make_engine(speculator=Giving(GOOD, **{name: number}))
    guarded = GuardedSpeculator("mine", Giving(RuntimeError("boom")), lambda: Giving(GOOD, **{name: number}))
    with pytest.raises(StepFailedError, match=f"fallback of {says}"):
        guarded.ask.propose(VIEW)


def test_a_fallback_drafts_no_more_than_the_first_and_no_trees_that_were_not_announced() -> None:
    guarded = GuardedSpeculator(
        "mine", Giving(RuntimeError("boom")), lambda: Giving(TREE, max_draft_tokens=9, drafts_trees=True)
    )
    with pytest.raises(StepFailedError, match="must be linear"):
        guarded.ask.propose(VIEW)
    assert guarded.max_draft_tokens == 3


def test_requests_go_on_with_the_drafts_of_the_fallback() -> None:
    def right(tokens: Any) -> list[int]:
        return fake_text(tokens.tolist(), 3, eos=-1)

    prompt = (1, 2, 3)
    spare = ScriptedSpeculator(right)
    broken = Made(label="chosen", component=Giving(RuntimeError("boom")), make_fallback=lambda: spare)
    engine = make_engine(backend=FakeBackend(eos=-1), speculator=broken)
    engine.add(Request(request_id="r", prompt_token_ids=prompt, params=SamplingParams(max_tokens=13)))
    assert drain(engine)["r"].token_ids.tolist() == fake_text(prompt, 13, eos=-1)
    assert spare.num_accepted == 9
    assert engine.stage("speculation").fault == ""
    assert engine.totals.num_drafters_quarantined == 1


class Breaks(AsManyAsMay):
    """Goes wrong once it is asked a second time, in one way."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.num_asked = 0

    def choose(self, view: LengthView) -> Any:
        self.num_asked += 1
        if self.num_asked == 1 or self.way == "on_verified":
            return super().choose(view)
        if self.way == "raises":
            raise RuntimeError("boom")
        return {"too many": view.max_draft_tokens + 1, "negative": -view.max_draft_tokens, "no array": [3]}[self.way]

    def on_verified(self, step: VerifiedStep) -> None:
        if self.way == "on_verified":
            raise RuntimeError("boom")


class One(AsManyAsMay):
    """A draft for everybody."""

    def choose(self, view: LengthView) -> Any:
        return np.ones_like(view.max_draft_tokens)


@pytest.mark.parametrize("has_fallback", [True, False])
@pytest.mark.parametrize("way", ["raises", "too many", "negative", "no array", "on_verified"])
def test_a_draft_length_that_fails_is_replaced_or_speculation_ends(
    way: str, has_fallback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The text is the same; drafts are those of the first step, and from then on one for each step, or none."""
    speculator = ScriptedSpeculator(lambda tokens: fake_text(tokens.tolist(), 3, eos=-1))
    length = Made(label="draft_length mine", component=Breaks(way), make_fallback=One if has_fallback else None)
    engine = make_engine(backend=FakeBackend(eos=-1), speculator=speculator, draft_length=length)
    prompt = (1, 2, 3)
    engine.add(Request(request_id="r", prompt_token_ids=prompt, params=SamplingParams(max_tokens=13)))
    assert drain(engine)["r"].token_ids.tolist() == fake_text(prompt, 13, eos=-1)
    # One token of the prompt's step and four of the first drafts; of the eight that are left every second is a draft.
    assert speculator.num_accepted == (3 + 4 if has_fallback else 3)
    assert engine.totals.num_drafters_quarantined == 1
    assert bool(engine.stage("speculation").fault) is not has_fallback
    assert "draft_length mine" in caplog.text


def test_who_writes_into_what_it_is_shown_is_out_and_the_text_is_right() -> None:
    class Writes(Giving):
        def propose(self, view: Any) -> Drafts:
            view.token_ids[0][:] = 5
            return super().propose(view)

    engine = make_engine(backend=FakeBackend(eos=-1), speculator=Writes(None), prefix_caching=True)
    prompt = tuple(range(1, 10))
    engine.add(Request(request_id="r", prompt_token_ids=prompt, params=SamplingParams(max_tokens=13)))
    assert drain(engine)["r"].token_ids.tolist() == fake_text(prompt, 13, eos=-1)
    assert "read-only" in engine.stage("speculation").fault


def test_a_speculator_that_cannot_be_closed_keeps_nobody_from_being_closed(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(Giving):
        def close(self) -> None:
            raise RuntimeError("cannot free the draft cache")

    executor = FakeExecutor(FakeBackend())
    engine = make_engine(executor=executor, speculator=Stuck(None))
    engine.close()
    assert "cannot free the draft cache" in caplog.text
