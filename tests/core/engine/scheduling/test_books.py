from __future__ import annotations

import numpy as np
import pytest

from support.core.scheduling_books import Books
from trencadis.records import Drafts, Plan, Request, SamplingParams
from trencadis_testing.fakes import fake_text

PROMPT = tuple(range(1, 11))


def request(name: str = "r", prompt=PROMPT, **fields) -> Request:
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)
    return Request(request_id=name, prompt_token_ids=tuple(prompt), params=params, **fields)


def plan(*entries, step=0, admitted=(), preempted=(), drafts=()) -> Plan:
    """A plan of ``(slot, start, length, samples)``."""
    slots, starts, lengths, samples = zip(*entries, strict=True) if entries else ((), (), (), ())
    count = np.array(slots, np.int32)
    return Plan(
        step=step,
        slots=count,
        rows=count,
        epochs=count.astype(np.int64),
        starts=np.array(starts, np.int32),
        num_scheduled=np.array(lengths, np.int32),
        samples=np.array(samples, np.bool_),
        drafts=Drafts(num_drafts=np.array(drafts, np.int32), token_ids=np.zeros(sum(drafts), np.int32))
        if drafts
        else None,
        admitted=np.array(admitted, np.int32),
        preempted=np.array(preempted, np.int32),
    )


class Desk:
    """Books of two requests on slots 0 and 1."""

    def __init__(self, *, swaps: bool = False, second=None) -> None:
        self.books = Books(block_size=4, max_model_len=40, swaps=swaps)
        self.books.open(request("r"))
        self.books.open(second or request("s"))

    def check(self, made: Plan, *, beside: bool = False) -> None:
        self.books.check_plan(made, {0: "r", 1: "s"}, token_budget=12, may_admit_beside=beside)


def test_a_prompt_in_chunks_and_the_tokens_behind_it_are_entered() -> None:
    harness = Desk()
    harness.check(plan((0, 0, 6, False), admitted=[0]))
    harness.check(plan((0, 6, 4, True), step=1))
    harness.check(plan((0, 10, 1, True), step=2))
    assert harness.books.live["r"].num_tokens == 12
    assert harness.books.true_output("r") == fake_text(PROMPT, 20, eos=-1)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (plan((0, 0, 10, True), (1, 0, 10, True), admitted=[0, 1]), "4: "),
        (plan((0, 0, 4, False), (0, 4, 4, False), admitted=[0]), "8: "),
        (plan((0, 0, 4, False), admitted=[0], preempted=[0]), "13: "),
        (plan((0, 0, 4, False), admitted=[0], preempted=[1]), "16: "),
        (plan(preempted=[1]), "3: "),
        (plan((0, 0, 4, False), admitted=[0, 1]), "5: "),
        (plan((0, 0, 4, False)), "3: "),
        (plan((0, 4, 6, True), admitted=[0]), "30: "),
        (plan((0, 2, 8, True), admitted=[0]), "30: "),
        (plan((0, 12, 1, True), admitted=[0]), "30: "),
        (plan((0, 0, 4, True), admitted=[0]), "6, 8: "),
        (plan((0, 0, 10, False), admitted=[0]), "6, 8: "),
        (plan((0, 0, 11, True), admitted=[0]), "6, 8: "),
    ],
)
def test_a_plan_that_may_not_come_first_is_named_by_its_number(made, message) -> None:
    with pytest.raises(AssertionError, match=message):
        Desk().check(made)


@pytest.mark.parametrize(("start", "message"), [(7, "7: a chunk skips"), (5, "7, 29: a chunk overlaps")])
def test_chunks_follow_on_each_other(start, message) -> None:
    harness = Desk()
    harness.check(plan((0, 0, 6, False), admitted=[0]))
    with pytest.raises(AssertionError, match=message):
        harness.check(plan((0, start, 2, False), step=1))


def test_nobody_is_admitted_twice() -> None:
    harness = Desk()
    harness.check(plan((0, 0, 6, False), admitted=[0]))
    with pytest.raises(AssertionError, match="3: it is admitted and runs already"):
        harness.check(plan((0, 0, 6, False), step=1, admitted=[0]))


def test_a_sequence_takes_from_the_cache_what_another_of_its_salt_computed() -> None:
    for second, is_shared in (
        (request("s"), True),
        (request("s", cache_salt="other"), False),
        (request("s", prompt=(1, 2, 3, 4, 5, 6, 7, 9, 9, 9)), False),
    ):
        harness = Desk(second=second)
        harness.check(plan((0, 0, 10, True), admitted=[0]))
        hit = plan((1, 8, 2, True), step=1, admitted=[1])
        if is_shared:
            harness.check(hit)
            continue
        with pytest.raises(AssertionError, match="nobody put it there"):
            harness.check(hit)


def test_rejected_drafts_are_computed_again() -> None:
    harness = Desk()
    harness.check(plan((0, 0, 10, True), admitted=[0]))
    harness.books.committed(0, [1])
    harness.check(plan((0, 10, 4, True), step=1, drafts=[3]))
    harness.books.committed(1, [2])  # one of three stood
    assert harness.books.live["r"].next_start == 12
    assert harness.books.live["r"].num_tokens == 13
    with pytest.raises(AssertionError, match="7: a chunk skips"):
        harness.check(plan((0, 14, 1, True), step=2))


def test_more_tokens_than_were_verified_are_a_fault() -> None:
    harness = Desk()
    harness.check(plan((0, 0, 10, True), admitted=[0]))
    harness.check(plan((0, 10, 2, True), step=1, drafts=[1]))
    with pytest.raises(AssertionError, match="29: "):
        harness.books.committed(1, [3])


@pytest.mark.parametrize("swaps", [True, False])
def test_only_with_swapping_a_preempted_sequence_goes_on_inside_a_block(swaps) -> None:
    harness = Desk(swaps=swaps)
    harness.check(plan((0, 0, 10, True), admitted=[0]))
    harness.check(plan(step=1, preempted=[0]))
    assert harness.books.live["r"].is_preempted
    back = plan((0, 10, 1, True), step=2, admitted=[0])
    if swaps:
        harness.check(back)
        assert not harness.books.live["r"].is_preempted
    else:
        with pytest.raises(AssertionError, match="30: "):
            harness.check(back)


def test_what_ended_or_was_preempted_meanwhile_is_not_counted() -> None:
    harness = Desk()
    harness.check(plan((0, 0, 10, True), admitted=[0]))
    harness.check(plan((0, 10, 3, True), step=1, drafts=[2]))
    assert harness.books.close("r").num_tokens == 12
    harness.books.committed(1, [1])
    assert set(harness.books.live) == {"s"}
