"""The story of a request: every step it was in the engine for, the true reason, and no step without one."""

from __future__ import annotations

from typing import Any

import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import InvalidRequestError
from trencadis.interfaces import SchedulerView, SchedulingPolicy, TokenSplit
from trencadis.records import FinishReason, Request, SamplingParams
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend


def engine_of(**options: Any) -> Any:
    backend = options.pop("backend", None) or FakeBackend(eos=-1, max_model_len=64)
    return make_engine(**{"backend": backend, "async_scheduling": False, "clock": SimulatedClock(), **options})


def add(engine: Any, name: str, length: int = 5, num_tokens: int = 3, **more: Any) -> None:
    prompt = tuple((ord(name[0]) * 7 + i) % 97 for i in range(length))
    params = SamplingParams(max_tokens=num_tokens)
    engine.add(Request(request_id=name, prompt_token_ids=prompt, params=params, **more))


def story(engine: Any, name: str) -> list[dict[str, Any]]:
    (request,) = engine.answer("explain", {"request_id": name})["requests"]
    return list(request["spans"])


def test_a_request_alone_is_admitted_decodes_and_ends():
    engine = engine_of()
    add(engine, "a")
    drain(engine)
    (request,) = engine.answer("explain", {"request_id": "a"})["requests"]
    assert (request["state"], request["finish_reason"], request["num_output_tokens"]) == ("finished", "length", 3)
    first, second = request["spans"]
    assert (first["outcome"], first["reason"], first["tokens"], first["rank"]) == (
        "prefill",
        "admitted",
        (0, 5),
        (1, 1),
    )
    assert (second["outcome"], second["num_steps"], second["tokens"], second["num_tokens"]) == ("decode", 2, (5, 7), 2)
    assert (first["buckets"], second["buckets"]) == (("prefill 1x5, 0 blocks",), ("decode 1x1, 2 blocks",))
    assert first["policy"] == "scheduling"


def test_a_prefix_that_was_cached_is_told():
    engine = engine_of()
    for _ in range(2):
        add(engine, "a", 9)
        drain(engine)
    assert story(engine, "a")[0]["reason"] == "admitted, 8 tokens were there already"


def test_who_waits_for_a_row_says_so_with_its_rank_and_steps_of_one_reason_are_one_span():
    engine = engine_of(max_num_seqs=1)
    add(engine, "a", num_tokens=9)
    add(engine, "b")
    add(engine, "c")
    drain(engine)
    waited, *_ = story(engine, "b")
    assert (waited["outcome"], waited["num_steps"], waited["last_step"]) == ("waited", 9, 8)
    assert waited["reason"] == "engine.max_num_seqs sequences run already"
    assert (story(engine, "c")[0]["num_steps"], waited["rank"]) == (12, (2, 2))


def test_who_finds_no_blocks_says_how_many_it_needs_and_who_is_behind_says_behind_whom():
    engine = engine_of(num_blocks=8, max_num_batched_tokens=64, backend=FakeBackend(eos=-1, max_model_len=32))
    add(engine, "a", 17, 4)
    add(engine, "big", 18, 2)
    add(engine, "small", 3, 2)
    drain(engine)
    waited = story(engine, "big")[0]
    assert (waited["outcome"], waited["reason"], waited["other"]) == ("waited", "no free blocks", "")
    assert (waited["blocks_needed"], waited["blocks_free"]) == ((5, 5), (3, 3))
    behind = story(engine, "small")[0]
    assert (behind["reason"], behind["other"]) == ("behind one that finds no free blocks", "big")


def test_who_waits_for_tokens_of_the_budget_says_so():
    engine = engine_of(max_num_batched_tokens=6)
    add(engine, "a", 20)
    add(engine, "b", 4)
    drain(engine)
    waited = story(engine, "b")[0]
    assert (waited["outcome"], waited["num_steps"]) == ("waited", 3)
    assert waited["reason"] == "the token budget was used up"
    chunks = story(engine, "a")
    assert [span["tokens"] for span in chunks[:2]] == [(0, 6), (6, 20)]
    assert chunks[1]["num_steps"] == 3


def test_a_victim_says_for_whom():
    engine = engine_of(num_blocks=8, backend=FakeBackend(eos=-1, max_model_len=32))
    add(engine, "a", 12, 12)
    add(engine, "b", 12, 12)
    drain(engine)
    (lost,) = [span for span in story(engine, "b") if span["outcome"] == "preempted"]
    assert (lost["reason"], lost["blocks_needed"], lost["blocks_free"]) == (
        "running sequences needed blocks",
        (2, 2),
        (0, 0),
    )


class Urgent(SchedulingPolicy):
    """Smaller priorities first, and others give way."""

    preempts = True

    def order(self, view: SchedulerView) -> Any:
        return view.waiting[view.priority[view.waiting].argsort(kind="stable")]

    def preempt_for(self, view: SchedulerView, *, slot: int, candidates: Any) -> int:
        return int(candidates[-1]) if view.priority[candidates[-1]] > view.priority[slot] else -1


def test_who_gave_way_says_to_whom():
    engine = engine_of(policy=Urgent(), max_num_seqs=1)
    add(engine, "a", num_tokens=9, priority=5)
    engine.step()
    add(engine, "hurried", priority=0)
    drain(engine)
    (lost,) = [span for span in story(engine, "a") if span["outcome"] == "preempted"]
    assert (lost["reason"], lost["other"]) == ("it gave way to a waiting request", "hurried")


class NoDecodes(SchedulingPolicy):
    """Every other step is for prompts only."""

    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        return (
            TokenSplit(decode=0, prefill=token_budget) if len(view.waiting) else TokenSplit(token_budget, token_budget)
        )


def test_who_runs_and_gets_no_token_says_so():
    engine = engine_of(policy=NoDecodes(), max_num_batched_tokens=4)
    add(engine, "a", 4, 6)
    engine.step()
    add(engine, "b", 4)
    engine.step()
    held = story(engine, "a")[-1]
    assert (held["outcome"], held["reason"]) == (
        "held",
        "no tokens of the budget were left for it: decodes 0, prefills 4",
    )


def test_every_step_of_every_request_is_told_and_tokens_add_up():
    engine = engine_of(
        num_blocks=10, max_num_seqs=3, max_num_batched_tokens=9, backend=FakeBackend(eos=-1, max_model_len=40)
    )
    for name in "abcdefgh":
        add(engine, name, 3 + ord(name) % 11, 7)
    ends = drain(engine)
    for name in "abcdefgh":
        spans = story(engine, name)
        steps = [step for span in spans for step in range(span["first_step"], span["last_step"] + 1)]
        assert steps == list(range(len(steps))), "from its arrival on, each step once"
        ran = sum(span["num_tokens"] for span in spans)
        assert ran >= ends[name].num_prompt_tokens + 7 - 1 - ends[name].num_cached_tokens
        assert sum(span["outcome"] == "preempted" for span in spans) == ends[name].num_preemptions


def test_a_step_that_failed_is_told_with_its_error():
    def fail(batch: Any, one: Any) -> None:
        if batch.step == 1:
            raise RuntimeError("the device is on fire")

    engine = engine_of(backend=FakeBackend(eos=-1, max_model_len=64, fails=fail))
    add(engine, "a")
    add(engine, "b")
    drain(engine)
    failed = [span for span in story(engine, "a") if span["outcome"] == "failed"]
    assert ["on fire" in span["reason"] for span in failed] == [True]


def test_who_is_ended_while_a_step_is_planned_is_told_why():
    engine = engine_of(num_blocks=4, backend=FakeBackend(eos=-1, max_model_len=16))
    add(engine, "a", 11, 5)
    engine.step()
    engine._state.blocks.allocate(engine._state.blocks.num_available)  # somebody else takes the rest
    drain(engine)
    last = story(engine, "a")[-1]
    assert last["outcome"] == "failed"
    assert "no room for this sequence alone" in last["reason"]


def test_a_slot_that_was_used_again_tells_two_stories():
    engine = engine_of()
    add(engine, "a")
    drain(engine)
    add(engine, "b")
    assert engine.abort("b").finish_reason is FinishReason.ABORT
    (request,) = engine.answer("explain", {"request_id": "b"})["requests"]
    assert (request["spans"], request["finish_reason"]) == ((), "abort")


def test_the_completions_of_one_request_are_told_together():
    engine = engine_of()
    add(engine, "a/0")
    add(engine, "a/1")
    add(engine, "ab")
    found = engine.answer("explain", {"request_id": "a"})["requests"]
    assert [one["request_id"] for one in found] == ["a/0", "a/1"]


def test_the_record_is_bounded_and_forgets_requests_with_their_steps():
    engine = engine_of(explain_steps=6)
    for index in range(40):
        add(engine, f"r{index}")
        drain(engine)
    answer = engine.answer("explain", {"request_id": "r39"})
    assert answer["newest_step"] - answer["oldest_step"] == 5
    with pytest.raises(
        InvalidRequestError, match=r"'r1' is not known: it was never seen, or it ended before the last 6 steps"
    ):
        engine.answer("explain", {"request_id": "r1"})
    decisions = engine.stage("explain")
    assert len(list(decisions.lives())) <= 4
    assert len(decisions.notes) == 6


def test_what_is_left_of_a_long_story_says_that_it_is_not_all():
    engine = engine_of(explain_steps=4)
    add(engine, "a", num_tokens=20)
    drain(engine)
    (request,) = engine.answer("explain", {"request_id": "a"})["requests"]
    assert not request["is_complete"]
    assert sum(span["num_steps"] for span in request["spans"]) == 4


def test_without_a_record_the_setting_is_named():
    engine = engine_of(explain_steps=0)
    add(engine, "a")
    drain(engine)
    with pytest.raises(InvalidRequestError, match=r"engine\.explain_steps is 0"):
        engine.answer("explain", {"request_id": "a"})
