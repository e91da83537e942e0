from __future__ import annotations

import numpy as np
import pytest

from trencadis.activity import ACTIVITY, ActivityView, EnginePhase
from trencadis.clock import SimulatedClock
from trencadis.interfaces import BucketingStrategy, SchedulerView, SchedulingPolicy
from trencadis.records import Bucket, BucketLimits, Request, SamplingParams, Shape
from trencadis_testing.doubles import ScriptedSpeculator
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text

PROMPT = tuple(range(1, 11))


def request(name: str = "r", prompt: tuple[int, ...] = PROMPT, **params: object) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(**{"max_tokens": 8, **params}))


def test_next_step_is_submitted_before_the_first_is_waited_for() -> None:
    backend = FakeBackend(eos=-1)
    engine = make_engine(backend=backend)
    engine.add(request())
    engine.step()
    assert backend.num_batches == 2
    backend = FakeBackend(eos=-1)
    engine = make_engine(backend=backend, async_scheduling=False)
    engine.add(request())
    engine.step()
    assert backend.num_batches == 1


def test_generated_blocks_are_reused_by_a_follow_up_prompt() -> None:
    engine = make_engine(backend=FakeBackend(eos=-1))
    engine.add(request("turn 1", max_tokens=12))
    reply = tuple(drain(engine)["turn 1"].token_ids.tolist())
    engine.add(request("turn 2", PROMPT + reply + (5, 6)))
    assert drain(engine)["turn 2"].num_cached_tokens == 20  # 21 tokens have KV: the last sampled one has none


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_prompt_logprobs_of_a_step_outlive_a_preemption_meanwhile(max_tokens: int) -> None:
    """A prompt's last chunk is in flight, with a token that ends its sequence, while others need its blocks."""
    engine = make_engine(num_blocks=10, backend=FakeBackend(eos=-1, max_model_len=40), async_scheduling=True)
    prompts = {str(i): tuple((i * 11 + j) % 97 for j in range(6)) for i in range(24)}
    slots: dict[int, str] = {}
    for i, (name, prompt) in enumerate(prompts.items()):
        scored = i % 2
        params = {"prompt_logprobs": 0, "max_tokens": max_tokens} if scored else {"max_tokens": 12}
        slots[engine.add(request(name, prompt, **params))] = name
    found: dict[str, set[int]] = {name: set() for name in prompts}
    while engine.has_work:
        for entry in engine.step().prompt_logprobs:
            found[slots[entry.index]].add(entry.position)
    assert engine.totals.num_preempted > 0
    assert all(found[name] == set(range(1, 6)) for i, name in enumerate(prompts) if i % 2)


def test_drafts_that_are_right_save_steps_and_never_change_the_text() -> None:
    def steps(draft) -> tuple[int, list[int]]:
        engine = make_engine(backend=FakeBackend(eos=-1), speculator=ScriptedSpeculator(draft))
        engine.add(request("r", max_tokens=24))
        return engine, drain(engine)["r"].token_ids.tolist()

    plain = fake_text(PROMPT, 24, eos=-1)
    right, text = steps(lambda tokens: fake_text(tokens.tolist(), 3, eos=-1))
    assert text == plain
    assert right.totals.num_accepted_tokens == right.totals.num_draft_tokens > 0
    wrong, text = steps(lambda tokens: [96 - fake_text(tokens.tolist(), 1, eos=-1)[0]] * 3)
    assert text == plain
    assert wrong.totals.num_accepted_tokens < wrong.totals.num_draft_tokens
    assert right.totals.num_steps < wrong.totals.num_steps


def test_close_ends_requests_and_may_be_called_twice() -> None:
    backend = FakeBackend()
    engine = make_engine(backend=backend)
    engine.add(request("a"))
    engine.step()
    engine.close()
    engine.close()
    assert backend.is_closed
    assert engine.inspect().blocks.num_used == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_no_token_is_computed_beyond_the_last(overlap: bool) -> None:
    engine = make_engine(backend=FakeBackend(eos=-1), async_scheduling=overlap)
    engine.add(request("r", max_tokens=8))
    drain(engine)
    assert engine.totals.num_scheduled_tokens == len(PROMPT) + 7  # the eighth token is sampled, never fed back


def test_admission_leaves_blocks_for_running_sequences_to_grow() -> None:
    engine = make_engine(num_blocks=200, backend=FakeBackend(eos=-1, max_model_len=800), max_num_batched_tokens=2000)
    engine.add(request("running", max_tokens=100))
    engine.step()
    free = engine.inspect().blocks.num_available
    engine.add(request("large", tuple(i % 97 for i in range(4 * free)), max_tokens=1))
    engine.step()
    assert engine.num_waiting == 1
    assert set(drain(engine)) == {"running", "large"}


def test_those_behind_a_skipped_sequence_are_admitted_once_each() -> None:
    class SkipsTheFirst(SchedulingPolicy):
        def chunk(self, view: SchedulerView, *, slot: int, num_remaining: int, token_budget: int) -> int:
            return 0 if slot == 0 and view.running.size + view.waiting.size > 3 else min(num_remaining, token_budget)

    engine = make_engine(policy=SkipsTheFirst())
    prompts = {str(i): PROMPT[: 4 + i] for i in range(6)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt))
    ends = drain(engine)
    assert {name: end.token_ids.tolist() for name, end in ends.items()} == {
        name: fake_text(prompt, 8) for name, prompt in prompts.items()
    }


@pytest.mark.parametrize(("layout", "first"), [("ragged", EnginePhase.FORWARD), ("padded", EnginePhase.COMPILING)])
def test_whoever_watches_sees_the_step_on_the_device_and_whether_its_shape_is_new(
    layout: str, first: EnginePhase
) -> None:
    view, seen = ActivityView(), []
    ACTIVITY.share(view.file)
    view.close_file()
    backend = FakeBackend(layout=layout, eos=-1, fails=lambda *_: seen.append(view.read()))
    engine = make_engine(backend=backend, warmup=False, async_scheduling=False)
    for name in "ab":
        del seen[:]
        engine.add(request(name, (5 + (name == "b"),) * 10, max_tokens=1))
        beat = view.read().beat
        drain(engine)
        assert [reading.phase for reading in seen] == [first if name == "a" else EnginePhase.FORWARD]
        assert view.read().phase is EnginePhase.COMMITTING
        assert view.read().beat > seen[0].beat > beat
    assert seen[0].step == 1


def test_no_limit_holds_while_buckets_are_prepared() -> None:
    view, seen = ActivityView(), []
    ACTIVITY.share(view.file)
    view.close_file()

    class Watched(FakeBackend):
        def prepare(self, bucket: Bucket) -> None:
            seen.append(view.read().phase)

    class OneBucket(BucketingStrategy):
        def buckets(self, limits: BucketLimits) -> tuple[Bucket, ...]:
            return (Bucket.of(Shape(1, 1, 1)),)

        def bucket_for(self, shape: Shape) -> Bucket:
            return Bucket.of(shape)

    make_engine(backend=Watched(layout="padded"), bucketing=OneBucket())
    assert seen == [EnginePhase.COMPILING]
    assert view.read().phase is EnginePhase.LOADING


def test_starved_sequence_is_admitted_before_all_others() -> None:
    class Youngest(SchedulingPolicy):
        def order(self, view: SchedulerView):
            return view.waiting[np.argsort(-view.arrival_s[view.waiting], kind="stable")]

    clock = SimulatedClock()
    engine = make_engine(policy=Youngest(), clock=clock, max_num_seqs=1, max_wait_s=5.0, async_scheduling=False)
    order = []
    engine.add(request("old", max_tokens=2))
    for i in range(12):
        clock.advance(1.0)
        engine.add(request(f"new {i}", max_tokens=2))
        order += [end.request_id for end in engine.step().finished]
    assert "old" not in order[:2]
    assert "old" in order


def test_a_paused_engine_plans_nothing_and_loses_nothing() -> None:
    engine = make_engine(backend=FakeBackend(eos=-1))
    engine.add(request("before", max_tokens=9))
    engine.step()
    engine.is_paused = True
    engine.add(request("meanwhile", max_tokens=9))
    engine.step()  # what is in flight ends
    num_steps = engine.totals.num_steps
    assert engine.has_work
    assert engine.is_stalled
    for _ in range(5):
        assert not engine.step().slots.size
    assert engine.totals.num_steps == num_steps
    engine.is_paused = False
    assert [end.token_ids.tolist() for end in drain(engine).values()] == [fake_text(PROMPT, 9, eos=-1)] * 2
