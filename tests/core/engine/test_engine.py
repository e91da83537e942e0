from __future__ import annotations

import numpy as np
import pytest

from trencadis.activity import ACTIVITY, ActivityView, EnginePhase
from trencadis.clock import SimulatedClock
from trencadis.errors import InvalidRequestError, PromptTooLongError, RequestRefusedError, StepFailedError
from trencadis.interfaces import BucketingStrategy, SchedulerView, SchedulingPolicy
from trencadis.records import Batch, Bucket, BucketLimits, FinishReason, Pass, Request, SamplingParams, Shape
from trencadis_testing.doubles import ScriptedSpeculator
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text

PROMPT = tuple(range(1, 11))


def request(name: str = "r", prompt: tuple[int, ...] = PROMPT, **params: object) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(**{"max_tokens": 8, **params}))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("token_budget", [1, 3, 4, 64])
@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_text_does_not_depend_on_chunks_overlap_or_layout(overlap: bool, token_budget: int, layout: str) -> None:
    engine = make_engine(
        backend=FakeBackend(layout=layout, max_model_len=256),
        max_num_batched_tokens=token_budget,
        async_scheduling=overlap,
        warmup=False,
    )
    prompts = {str(n): tuple((n * 7 + i) % 97 for i in range(n)) for n in (1, 2, 9, 20)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt))
    assert {name: end.token_ids.tolist() for name, end in drain(engine).items()} == {
        name: fake_text(prompt, 8) for name, prompt in prompts.items()
    }


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


def test_prompt_over_the_limit_is_refused_at_once_and_others_go_on() -> None:
    engine = make_engine(num_blocks=8)
    engine.add(request("good"))
    with pytest.raises(PromptTooLongError, match=r"has 32 tokens; .* the limit is 31"):
        engine.add(request("long", tuple(range(32))))
    assert drain(engine)["good"].token_ids.tolist() == fake_text(PROMPT, 8)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("x", ()), "empty prompt"),
        (request("x", (1, 97)), "token id 97 in the prompt is outside the vocabulary, 0 to 96"),
        (request("x", (-1,)), "token id -1"),
        (request("x", stop_token_ids=(500,)), "stop_token_ids: token id 500 is outside"),
        (request("live"), "is live already"),
    ],
)
def test_impossible_request_is_refused_in_words(bad: Request, message: str) -> None:
    engine = make_engine()
    engine.add(request("live"))
    with pytest.raises(InvalidRequestError, match=message):
        engine.add(bad)
    assert set(drain(engine)) == {"live"}


def test_second_prompt_with_the_same_start_takes_it_from_the_cache() -> None:
    engine = make_engine()
    engine.add(request("a"))
    assert drain(engine)["a"].num_cached_tokens == 0
    engine.add(request("b"))
    end = drain(engine)["b"]
    assert end.num_cached_tokens == 8  # two full blocks of four; the last token is always computed
    assert end.token_ids.tolist() == fake_text(PROMPT, 8)


def test_prompt_that_ends_with_a_block_still_computes_its_last_token() -> None:
    engine = make_engine()
    for name in "ab":
        engine.add(request(name, PROMPT[:8]))
        end = drain(engine)[name]
    assert end.num_cached_tokens == 4
    assert end.token_ids.tolist() == fake_text(PROMPT[:8], 8)


def test_generated_blocks_are_reused_by_a_follow_up_prompt() -> None:
    engine = make_engine(backend=FakeBackend(eos=-1))
    engine.add(request("turn 1", max_tokens=12))
    reply = tuple(drain(engine)["turn 1"].token_ids.tolist())
    engine.add(request("turn 2", PROMPT + reply + (5, 6)))
    assert drain(engine)["turn 2"].num_cached_tokens == 20  # 21 tokens have KV: the last sampled one has none


def test_tenants_do_not_share_blocks() -> None:
    engine = make_engine()
    for tenant in ("a", "b", "a"):
        engine.add(Request(request_id="r", prompt_token_ids=PROMPT, tenant=tenant))
        last = drain(engine)["r"].num_cached_tokens
        assert last == (0 if tenant == "b" else last)
    assert last == 8


def test_prompt_logprobs_bypass_the_cache() -> None:
    engine = make_engine()
    engine.add(request("a"))
    drain(engine)
    engine.add(request("b", prompt_logprobs=0))
    positions = []
    while engine.has_work:
        positions += [entry.position for entry in engine.step().prompt_logprobs]
    assert positions == list(range(1, 10))


@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_sequences_are_recomputed_to_the_same_text(overlap: bool) -> None:
    engine = make_engine(num_blocks=10, backend=FakeBackend(eos=-1, max_model_len=40), async_scheduling=overlap)
    prompts = {str(i): tuple((i * 11 + j) % 97 for j in range(6)) for i in range(4)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, max_tokens=20))
    ends = drain(engine)
    assert engine.totals.num_preempted > 0
    assert engine.totals.num_recomputed_tokens > 0
    for name, prompt in prompts.items():
        assert ends[name].token_ids.tolist() == fake_text(prompt, 20, eos=-1)


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


def test_abort_works_in_every_state_and_twice() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add(request("running", max_tokens=100))
    engine.add(request("waiting"))
    engine.step()
    for name in ("waiting", "running"):
        end = engine.abort(name)
        assert end is not None
        assert end.finish_reason is FinishReason.ABORT
        assert engine.abort(name) is None
    drain(engine)
    assert engine.inspect().blocks.num_used == 0


def test_min_tokens_outlasts_eos_and_ignore_eos_ignores_it() -> None:
    first = fake_text(PROMPT, 30, eos=-1)
    eos = first[2]
    for params, length in (({}, 3), ({"ignore_eos": True}, 30)):
        engine = make_engine(backend=FakeBackend(eos=eos))
        engine.add(request("r", max_tokens=30, **params))
        assert len(drain(engine)["r"].token_ids) == length
    engine = make_engine(backend=FakeBackend(eos=eos))
    engine.add(request("r", max_tokens=30, min_tokens=4))
    assert len(drain(engine)["r"].token_ids) > 3


def test_stop_token_ends_the_sequence_and_is_named() -> None:
    stop = fake_text(PROMPT, 5, eos=-1)[4]
    engine = make_engine(backend=FakeBackend(eos=-1))
    engine.add(request("r", max_tokens=30, stop_token_ids=(stop,)))
    end = drain(engine)["r"]
    assert (end.finish_reason, end.stop_token_id) == (FinishReason.STOP, stop)
    assert end.token_ids[-1] == stop


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


def test_drafts_get_what_the_decodes_leave_of_the_token_budget() -> None:
    """Three decodes with three drafts each in a budget of five: nobody stands still for another's drafts, or for its own."""
    speculator = ScriptedSpeculator(lambda tokens: fake_text(tokens.tolist(), 3, eos=-1))
    engine = make_engine(
        backend=FakeBackend(eos=-1), speculator=speculator, max_num_batched_tokens=5, async_scheduling=False
    )
    for name in "abc":
        engine.add(request(name, max_tokens=9))
    ends = drain(engine)
    assert [ends[name].token_ids.tolist() for name in "abc"] == [fake_text(PROMPT, 9, eos=-1)] * 3
    assert 0 < engine.totals.num_accepted_tokens == engine.totals.num_draft_tokens


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


def test_only_the_sequence_at_fault_ends_with_the_error() -> None:
    def fails(batch: Batch, one: Pass) -> None:
        if (one.rows == engine._state.table.row[bad]).any():
            raise RuntimeError("a bad logits processor")

    engine = make_engine(backend=FakeBackend(fails=fails))
    bad = -1
    for name in ("a", "bad", "c"):
        slot = engine.add(request(name, PROMPT[: 3 + len(name)]))
        bad = slot if name == "bad" else bad
    ends = drain(engine)
    assert ends["bad"].finish_reason is FinishReason.ERROR
    assert "a bad logits processor" in ends["bad"].error
    for name in ("a", "c"):
        assert ends[name].token_ids.tolist() == fake_text(PROMPT[:4], 8)


def test_policy_can_refuse_a_request() -> None:
    class Full(SchedulingPolicy):
        def admit(self, request: Request, *, num_waiting: int, num_waiting_tokens: int) -> str:
            return f"{num_waiting_tokens} tokens wait" if num_waiting else ""

    engine = make_engine(policy=Full())
    engine.add(request("a"))
    with pytest.raises(RequestRefusedError, match="10 tokens wait"):
        engine.add(request("b"))


def test_close_ends_requests_and_may_be_called_twice() -> None:
    backend = FakeBackend()
    engine = make_engine(backend=backend)
    engine.add(request("a"))
    engine.step()
    engine.close()
    engine.close()
    assert backend.is_closed
    assert engine.inspect().blocks.num_used == 0


def test_warm_up_prepares_every_bucket_of_a_padded_backend_largest_first() -> None:
    class Two(BucketingStrategy):
        def buckets(self, limits: BucketLimits) -> tuple[Bucket, ...]:
            return (Bucket(1, 64, 64), Bucket(8, 64, 64))

        def bucket_for(self, shape: Shape) -> Bucket:
            return Bucket(8, 64, 256, shape.phase)

    backend = FakeBackend(layout="padded")
    make_engine(backend=backend, bucketing=Two())
    assert backend.prepared == [Bucket(8, 64, 64), Bucket(1, 64, 64)]


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


def test_error_of_a_step_names_the_cause() -> None:
    def fails(batch: Batch, one: Pass) -> None:
        raise StepFailedError("sampler standard raised ValueError: NaN logits in row 0.")

    engine = make_engine(backend=FakeBackend(fails=fails))
    engine.add(request("a"))
    assert "NaN logits in row 0" in drain(engine)["a"].error
    assert engine.totals.num_failed_steps >= 1


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
