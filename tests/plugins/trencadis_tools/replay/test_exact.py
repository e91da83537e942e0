from __future__ import annotations

import itertools

import attrs
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.replays import record_of, recording_engine, replayed, serve_at_random
from trencadis.errors import ConfigError, RanksLostError
from trencadis.interfaces import DraftLength, Speculator
from trencadis.records import Drafts, Request, SamplingParams
from trencadis_plugins.scheduling.fcfs import Fcfs
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend
from trencadis_tools.recorder.flight_record import RecordedArrival, RecordedAttempt, RecordedChange, int32s
from trencadis_tools.replay import check_replayable, recorded_config, replay_exactly

POLICIES = ("fcfs", "prefill_first", "priority", "shortest_first", "fair_share", "deadline", "multi_level")
EVICTIONS = ("lru", "lfu", "slru", "two_queue", "s3_fifo", "arc", "cost_aware", "ttl")
LAYOUTS = {
    "ragged": {},
    "padded": {"layout": "padded", "max_prefill_batch_size": 4},
    "contiguous": {"layout": "padded", "contiguous": True, "max_prefill_batch_size": 2},
    "unified": {"layout": "unified"},
}


def random_run(seed, *, num_rounds=60, layout="ragged", **config):
    backend = FakeBackend(max_model_len=80, strict=False, **LAYOUTS[layout])
    engine = recording_engine(seed, backend=backend, config={"engine.warmup": False, **config})
    serve_at_random(engine, seed, num_rounds=num_rounds)
    return engine


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    policy=st.sampled_from(POLICIES),
    eviction=st.sampled_from(EVICTIONS),
    layout=st.sampled_from(sorted(LAYOUTS)),
    num_steps=st.sampled_from((7, 16, 2048)),
    preemption=st.sampled_from(("recompute", "swap")),
    overlaps=st.booleans(),
    num_blocks=st.integers(20, 40),
    caches=st.booleans(),
)
def test_the_same_plans_are_made_again(
    seed, policy, eviction, layout, num_steps, preemption, overlaps, num_blocks, caches
):
    engine = random_run(
        seed,
        layout=layout,
        **{
            "scheduling.name": policy,
            "eviction.name": eviction,
            "flight_recorder.num_steps": num_steps,
            "engine.preemption": preemption,
            "engine.async_scheduling": overlaps,
            "cache.num_blocks": num_blocks,
            "cache.prefix_caching": caches,
        },
    )
    record = record_of(engine)
    found = replayed(record)
    assert found.difference is None
    assert found.num_steps == record.num_steps > 0


CHANGES = st.one_of(
    st.fixed_dictionaries({"name": st.sampled_from(POLICIES)}),
    st.fixed_dictionaries(
        {"name": st.just("fair_share"), "options": st.fixed_dictionaries({"output_price": st.floats(0, 9)})}
    ),
    st.fixed_dictionaries(
        {"name": st.just("priority"), "options": st.fixed_dictionaries({"age_s": st.floats(0.1, 9)})}
    ),
    st.fixed_dictionaries({"options": st.just({})}),
    st.fixed_dictionaries({"shadow": st.sampled_from((*POLICIES, None))}),
    st.fixed_dictionaries({"name": st.sampled_from(POLICIES), "shadow": st.sampled_from(POLICIES)}),
)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    policy=st.sampled_from(POLICIES),
    changes=st.lists(st.tuples(st.integers(0, 25), CHANGES), min_size=1, max_size=6),
    num_steps=st.sampled_from((7, 16, 2048)),
    preemption=st.sampled_from(("recompute", "swap")),
    overlaps=st.booleans(),
)
def test_the_policy_changes_at_the_same_step_again(seed, policy, changes, num_steps, preemption, overlaps):
    engine = recording_engine(
        seed,
        config={
            "engine.warmup": False,
            "scheduling.name": policy,
            "flight_recorder.num_steps": num_steps,
            "engine.preemption": preemption,
            "engine.async_scheduling": overlaps,
        },
    )
    for number, (num_rounds, table) in enumerate(changes):
        serve_at_random(engine, seed + number, num_rounds=num_rounds, first=1000 * number)
        engine.answer("set_scheduling", {"table": table, "source": "a test"})
    serve_at_random(engine, seed, num_rounds=12, first=10**6)
    record = record_of(engine)
    found = replayed(record)
    assert found.difference is None
    assert found.num_steps == record.num_steps


def test_a_change_makes_the_plans_that_follow_it():
    engine = recording_engine(3, config={"engine.warmup": False, "scheduling.name": "fcfs"})
    serve_at_random(engine, 3, num_rounds=40)
    engine.answer("set_scheduling", {"table": {"name": "shortest_first"}, "source": "a test"})
    serve_at_random(engine, 4, num_rounds=40, first=1000)
    record = record_of(engine)
    assert replayed(record).difference is None
    record.events[:] = [event for event in record.events if not isinstance(event, RecordedChange)]
    assert replayed(record).difference is not None


def test_what_was_in_force_when_the_record_begins_is_so_again():
    engine = recording_engine(3, config={"scheduling.name": "fcfs", "flight_recorder.num_steps": 9})
    engine.answer("set_scheduling", {"table": {"name": "shortest_first", "shadow": "priority"}, "source": "a test"})
    serve_at_random(engine, 3, num_rounds=60)
    record = record_of(engine)
    assert record.frame is not None
    assert not any(isinstance(event, RecordedChange) for event in record.events)
    assert record.scheduling is not None
    assert (record.scheduling.table["name"], record.scheduling.table["shadow"]) == ("shortest_first", "priority")
    assert replayed(record).difference is None
    record.scheduling = None
    found = replayed(record).difference
    assert found is not None
    assert "Fcfs remembers nothing that is called" in found.cause


def test_a_record_begins_in_mid_run_once_the_ring_has_wrapped():
    engine = random_run(5, num_rounds=90, **{"flight_recorder.num_steps": 20})
    record = record_of(engine)
    plans = [event for event in record.events if isinstance(event, RecordedAttempt) and event.is_plan]
    assert record.frame is not None
    assert len(record.frame["sequences"]) > 8, "more wait than run"
    assert record.frame["in_flight"], "a step was under way"
    assert 20 <= len(plans) <= 41
    assert engine.totals.num_preempted > 0
    assert engine.totals.num_prompt_tokens_cached > 0
    assert replayed(record).difference is None


def test_prefix_affinity_is_replayed_from_the_start_and_refused_in_mid_run():
    from_start = record_of(random_run(3, **{"scheduling.name": "prefix_affinity"}))
    assert replayed(from_start).difference is None
    in_mid_run = record_of(random_run(3, **{"scheduling.name": "prefix_affinity", "flight_recorder.num_steps": 9}))
    with pytest.raises(ConfigError, match="PrefixAffinity does not declare what it remembers"):
        check_replayable(in_mid_run, name="x.flight")


@pytest.mark.parametrize("num_steps", [2048, 9])
@pytest.mark.parametrize(
    "config",
    [
        {"parallel.pipeline": 3, "executor.name": "processes"},
        {"parallel.tensor": 2, "parallel.expert": 2, "parallel.attention": "data", "executor.name": "processes"},
        {"defragmenter.enabled": "on", "defragmenter.trigger": "cost"},
    ],
    ids=["pipeline", "sequences of ranks", "moved blocks"],
)
def test_other_ways_to_plan_are_replayed(config, num_steps):
    layout = "contiguous" if "defragmenter.enabled" in config else "ragged"
    record = record_of(random_run(23, layout=layout, **config, **{"flight_recorder.num_steps": num_steps}))
    assert (record.frame is not None) == (num_steps == 9)
    assert replayed(record).difference is None


class Eager(Speculator):
    """Drafts the last token again, for whoever it is asked."""

    max_draft_tokens = 3

    def propose(self, view):
        last = np.array([tokens[-1] for tokens in view.token_ids], np.int32)
        return Drafts(num_drafts=view.max_draft_tokens, token_ids=np.repeat(last, view.max_draft_tokens))


class Timed(DraftLength):
    """Chooses by measured times, and rests now and then: what it measured is not in a record."""

    def __init__(self):
        self.measured_ns = self.num_rests = 0

    def on_verified(self, step):
        self.measured_ns += int(1e9 * (step.step_s + step.draft_s))

    def choose(self, view):
        return np.minimum(view.max_draft_tokens, self.measured_ns % 4).astype(np.int32)

    def rest(self):
        self.num_rests += 1
        self.measured_ns += 1
        return self.num_rests % 3


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    layout=st.sampled_from(("ragged", "padded")),
    length=st.sampled_from(("goodput", f"{__name__}:Timed")),
    num_steps=st.sampled_from((16, 2048)),
    overlaps=st.booleans(),
)
def test_drafts_whose_number_was_chosen_by_time_are_made_again(seed, layout, length, num_steps, overlaps):
    engine = random_run(
        seed,
        layout=layout,
        **{
            "speculation.name": f"{__name__}:Eager",
            "draft_length.name": length,
            "flight_recorder.num_steps": num_steps,
            "engine.async_scheduling": overlaps,
        },
    )
    record = record_of(engine)
    assert engine.totals.num_draft_tokens > 0
    if length != "goodput":  # that drafts in trials, which a short record may lack
        plans = [event for event in record.events if isinstance(event, RecordedAttempt) and event.is_plan]
        assert len({n for plan in plans for n in int32s(plan.num_drafts).tolist()}) > 1
    found = replay_exactly(record, *recorded_config(record, name="x.flight", may_import=True))
    assert found.difference is None
    assert found.num_steps == record.num_steps > 0


def test_failed_steps_are_taken_apart_as_recorded():
    passes = itertools.count(1)

    def fails(batch, one):
        if next(passes) % 7 == 0:
            raise RuntimeError("one pass in seven")

    backend = FakeBackend(max_model_len=80, strict=False, fails=fails)
    engine = recording_engine(
        backend=backend, config={"flight_recorder.pause_s": 1e9, "flight_recorder.folder": "/dev/null/no"}
    )
    serve_at_random(engine, 1, num_rounds=60)
    record = record_of(engine)
    assert engine.totals.num_failed_steps >= 5
    assert any(one.finish_reason == "error" for one in record.requests)
    assert replayed(record).difference is None


# --------------------------------------------------------------------------------------------------- what differs


def test_another_policy_is_noticed_at_the_first_plan_that_it_makes_differently(monkeypatch):
    record = record_of(random_run(7, **{"scheduling.name": "fcfs"}))
    monkeypatch.setattr(Fcfs, "order", lambda self, view: view.waiting[::-1])
    found = replayed(record)
    assert found.difference is not None
    recorded, made = found.difference.recorded, found.difference.replayed
    assert isinstance(recorded, RecordedAttempt)
    assert isinstance(made, RecordedAttempt)
    assert recorded.step == made.step == found.num_steps
    assert recorded.admitted != made.admitted


@pytest.mark.parametrize(
    "change",
    [
        {"engine": {"max_num_batched_tokens": 39}},
        {"eviction": {"name": "lfu"}},
        {"engine": {"async_scheduling": False}},
        {"cache": {"prefix_caching": False}},
    ],
    ids=lambda change: str(next(iter(change.values()))),
)
def test_another_setting_is_noticed(change):
    record = record_of(random_run(11, num_rounds=120))
    for table, values in change.items():
        record.config[table].update(values)
    assert replayed(record).difference is not None


@pytest.mark.parametrize("field", ["num_known_tokens", "num_like", "max_tokens", "priority"])
def test_another_request_is_noticed(field):
    record = record_of(random_run(13, num_rounds=120, **{"scheduling.name": "priority"}))
    place = next(i for i, one in enumerate(record.requests) if one.num_like > 8 and one.num_output_tokens > 2)
    one = record.requests[place]
    new = {"num_known_tokens": one.num_known_tokens - 1, "num_like": 0, "max_tokens": 1, "priority": 99}[field]
    shorter = {"num_prompt_tokens": new} if field == "num_known_tokens" else {}
    record.requests[place] = msgspec.structs.replace(one, **{field: new}, **shorter)
    assert replayed(record).difference is not None


# --------------------------------------------------------------------------------------------------- what is in it


def test_no_token_id_and_no_salt_is_in_a_record():
    engine = recording_engine(config={"flight_recorder.num_steps": 6})
    secret = tuple(range(60, 92))
    for number in range(12):
        engine.add(
            Request(
                request_id=str(number),
                prompt_token_ids=secret[number:] + secret[:number],
                params=SamplingParams(max_tokens=9, stop_token_ids=(61, 62)),
                cache_salt="pepper",
            )
        )
    while engine.has_work:
        engine.step()
    record = record_of(engine)
    assert record.frame is not None

    def numbers_in(value):
        if isinstance(value, np.ndarray):
            return value.ravel().tolist()
        if isinstance(value, dict):
            return [n for item in value.values() for n in numbers_in(item)]
        if isinstance(value, list):
            return [n for item in value for n in numbers_in(item)]
        return [value] if isinstance(value, int) else []

    frame = {name: value for name, value in record.frame.items() if name not in ("in_flight", "table")}
    runs = numbers_in(frame)
    assert not any(runs[i : i + 4] == list(secret[j : j + 4]) for i in range(len(runs)) for j in range(28))
    fields = {name for one in record.requests for name in msgspec.structs.asdict(one)}
    assert not {name for name in fields if "token_ids" in name}
    assert "pepper" not in str(record)
    plain = msgspec.msgpack.encode(record, enc_hook=lambda array: array.tobytes())
    assert np.array(secret[:4], "<i4").tobytes() not in plain
    assert np.array(secret[:4], "<i8").tobytes() not in plain


def test_requests_are_numbered_as_they_came():
    record = record_of(random_run(19))
    arrivals = [event.number for event in record.events if isinstance(event, RecordedArrival)]
    assert arrivals == list(range(len(arrivals)))
    assert [one.number for one in record.requests] == arrivals
    assert attrs.asdict(replayed(record))["num_steps"] == record.num_steps


class Losing(FakeExecutor):
    """Loses its ranks with every ninth batch, and starts them again."""

    num_batches = num_restarts = 0

    def submit(self, batch):
        self.num_batches += 1
        if self.num_batches % 9 == 0:
            raise RanksLostError("rank 0 was killed")
        return super().submit(batch)

    def restart(self):
        self.num_restarts += 1


def test_lost_ranks_are_lost_again_at_the_same_steps():
    executor = Losing(FakeBackend(max_model_len=80, strict=False))
    engine = recording_engine(executor=executor, config={"flight_recorder.folder": "/dev/null/no"})
    serve_at_random(engine, 29, num_rounds=50)
    assert executor.num_restarts >= 3
    assert replayed(record_of(engine)).difference is None
