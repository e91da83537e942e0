from __future__ import annotations

import copy
import json
import math
import tracemalloc
import zlib

import msgspec
import pytest

from support.replays import record_of, recording_engine, serve_at_random
from trencadis.cli.main import main
from trencadis_tools.recorder.flight_bounds import MAX_BYTES
from trencadis_tools.recorder.flight_record import RecordedAttempt, RecordedChange, encode_flight_record, int32s
from trencadis_tools.replay import recorded_config


@pytest.fixture(scope="module")
def record():
    engine = recording_engine(config={"flight_recorder.num_steps": 40, "scheduling.name": "fcfs"})
    serve_at_random(engine, 4, num_rounds=100)
    return record_of(engine)


@pytest.fixture
def dump(record, tmp_path):
    path = tmp_path / "x.flight"
    path.write_bytes(encode_flight_record(record))
    return path


def test_an_equal_schedule_is_said_and_exits_0(dump, record, capsys):
    assert main(["replay", str(dump)]) == 0
    assert capsys.readouterr().out == f"The schedule is equal in all {record.num_steps} steps.\n"


def test_show_prints_what_it_holds_and_replays_nothing(dump, record, capsys):
    assert main(["replay", str(dump), "--show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["reason"], shown["num_steps"], shown["begins"]) == ("request", record.num_steps, "in mid-run")
    assert shown["components"]["scheduling"] == "fcfs"
    assert shown["obstacles"] == []


def test_the_first_plan_that_differs_is_printed_beside_the_recorded_one(record, tmp_path, capsys):
    changed = msgspec.structs.replace(record, events=list(record.events))
    place, plan = [(i, e) for i, e in enumerate(record.events) if isinstance(e, RecordedAttempt) and e.is_plan][7]
    counts = int32s(plan.counts).copy()
    counts[0] += 3
    changed.events[place] = msgspec.structs.replace(plan, counts=counts.tobytes())
    path = tmp_path / "x.flight"
    path.write_bytes(encode_flight_record(changed))
    assert main(["replay", str(path)]) == 1
    first, recorded, replayed = capsys.readouterr().out.splitlines()
    slot, start = int32s(plan.slots)[0], int32s(plan.starts)[0]
    assert first == "The schedule is equal in 7 steps, and then differs:"
    assert recorded.startswith(f"  recorded: step {plan.step}: slot {slot}: {counts[0]} from {start}")
    assert replayed.startswith(f"  replayed: step {plan.step}: slot {slot}: {counts[0] - 3} from {start}")
    assert main(["replay", str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["equal_steps"], found["difference"]["event"]) == (7, place)


def test_other_settings_are_compared_on_the_same_simulated_device(dump, capsys):
    arguments = ["replay", str(dump), "--step-times", "h100:llama_3_1_8b", "--json", "--scheduling.name"]
    assert main([*arguments, "shortest_first"]) == 0
    recorded, same, other = json.loads(capsys.readouterr().out)["served"]
    assert [one["name"] for one in (recorded, same, other)] == [
        "fcfs, as recorded",
        "fcfs, simulated",
        "shortest_first",
    ]
    assert recorded["num_requests"] == same["num_requests"] == other["num_requests"] > 10
    assert same["num_preempted"] == pytest.approx(recorded["num_preempted"], rel=0.5)
    assert same["e2e_mean_s"] != other["e2e_mean_s"]
    assert main([*arguments, "fcfs"]) == 0
    _, one, again = json.loads(capsys.readouterr().out)["served"]
    assert {**one, "name": ""} == {**again, "name": ""}, "nothing was changed, and nothing is different"


def test_step_times_are_fitted_to_the_record(dump, capsys):
    pytest.importorskip("scipy")
    assert main(["replay", str(dump), "--engine.max-num-batched-tokens", "24"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("On a simulated device:")
    assert lines[-1].startswith("--engine.max-num-batched-tokens=24")
    recorded, same = (float(line.split()[-1]) for line in lines[2:4])
    assert math.isclose(recorded, same, rel_tol=0.6)


@pytest.mark.parametrize(
    ("change", "flags", "cause"),
    [
        ({"obstacles": ["a KV connector loads and saves blocks"]}, [], "cannot be replayed: a KV connector loads"),
        ({}, ["--scheduling.name", "no_such"], "no_such"),
        ({}, ["--scheduling.nam", "fcfs"], "no such flag"),
        ({}, ["--step-times", "no_such", "--scheduling.name", "priority"], "no_such"),
    ],
    ids=["connector", "policy", "flag", "step times"],
)
def test_what_cannot_be_replayed_is_refused_in_words(record, tmp_path, capsys, change, flags, cause):
    path = tmp_path / "x.flight"
    path.write_bytes(encode_flight_record(msgspec.structs.replace(record, **change)))
    assert main(["replay", str(path), *flags]) == 2
    assert cause in capsys.readouterr().err


def test_other_settings_of_an_engine_that_drafts_need_to_know_how_often_drafts_are_right(tmp_path, capsys):
    engine = recording_engine(config={"engine.async_scheduling": False})
    serve_at_random(engine, 4, num_rounds=20)
    record = record_of(engine)
    record.config["speculation"]["name"], record.max_draft_tokens = "ngram", 2
    record.config["draft_length"]["name"] = "fixed"
    _, *code = record.components["scheduling.name"]
    record.components |= {
        f"{noun}.name": (name, *code)
        for noun, name in (("speculation", "ngram"), ("draft_length", "fixed"), ("acceptance", "match"))
    }
    path = tmp_path / "x.flight"
    path.write_bytes(encode_flight_record(record))
    assert main(["replay", str(path)]) == 0, "nobody drafted"
    other = ["replay", str(path), "--step-times", "h100:llama_3_1_8b", "--json", "--scheduling.name", "priority"]
    assert main(other) == 2
    assert "nothing says how often its drafts are right" in capsys.readouterr().err

    def mean_tpot_s(share):
        assert main([*other, "--drafts", share]) == 0
        _, *served = json.loads(capsys.readouterr().out)["served"]
        assert len({one["num_requests"] for one in served}) == 1
        return [one["tpot_mean_s"] for one in served]

    for never, always in zip(mean_tpot_s("0"), mean_tpot_s("1"), strict=True):
        assert always < 0.6 * never


def replay(record, path, *flags):
    path.write_bytes(encode_flight_record(record))
    return main(["replay", str(path), *flags])


def copy_of(record, **change):
    return msgspec.structs.replace(copy.deepcopy(record), **change)


POLICY = "trencadis_testing.engines:ServeInOrder"


@pytest.mark.parametrize(
    ("noun", "table"),
    [
        ("scheduling", {"name": "evil_of_a_record:make", "options": {"path": "x"}}),
        ("scheduling", {"shadow": "evil_of_a_record:make"}),
        ("scheduling", {"fair_share": {"inner": "evil_of_a_record:make"}}),
        ("scheduling", {"name": "shortest_first", "shortest_first": {"predictor": "evil_of_a_record:make"}}),
        ("bucketing", {"name": "evil_of_a_record:make"}),
        ("eviction", {"fallback": "evil_of_a_record:make"}),
        ("speculation", {"name": "evil_of_a_record:make"}),
        ("executor", {"name": "evil_of_a_record:make"}),
    ],
    ids=str,
)
def test_code_that_a_record_names_is_not_imported(record, tmp_path, capsys, monkeypatch, noun, table):
    made = tmp_path / "made"
    (tmp_path / "evil_of_a_record.py").write_text(f"open({str(made)!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    hostile = copy_of(record)
    hostile.config[noun] |= table
    assert replay(hostile, tmp_path / "x.flight") == 2
    said = capsys.readouterr().err
    assert "x.flight): it would import evil_of_a_record and call make" in said
    assert "If you trust " in said
    assert "add --trust" in said
    assert not made.exists()


def test_code_that_a_change_within_a_record_names_is_not_imported(record, tmp_path, capsys):
    change = RecordedChange.of(record.events[0].now_s, {"name": "os:system", "options": {"command": "true"}}, {})
    for hostile in (copy_of(record, events=[change, *record.events]), copy_of(record, scheduling=change)):
        assert replay(hostile, tmp_path / "x.flight") == 2
        assert "it would import os and call system" in capsys.readouterr().err


def test_a_record_that_is_trusted_is_replayed_with_what_it_names(tmp_path, capsys):
    engine = recording_engine(config={"scheduling.name": POLICY})
    serve_at_random(engine, 4, num_rounds=30)
    record = record_of(engine)
    assert replay(record, tmp_path / "x.flight") == 2
    assert "add --trust" in capsys.readouterr().err
    assert replay(record, tmp_path / "x.flight", "--trust") == 0


@pytest.mark.representatives(1)
@pytest.mark.parametrize("place", range(1, 4))
def test_components_of_other_code_are_refused_unless_the_record_is_trusted(record, tmp_path, capsys, place):
    other = copy_of(record)
    code = list(other.components["scheduling.name"])
    code[place] = "0" * 32
    other.components["scheduling.name"] = tuple(code)
    assert replay(other, tmp_path / "x.flight") == 2
    said = capsys.readouterr().err
    assert "scheduling.name is fcfs of trencadis " in said
    assert "000000000000" in said
    assert replay(other, tmp_path / "x.flight", "--trust") == 0


def test_a_record_cannot_have_a_replay_load_a_model_read_a_store_or_write_a_file(record, tmp_path):
    hostile = copy_of(record)
    hostile.config["model"] |= {"path": "/no/such/model", "trust_remote_code": True}
    hostile.config["kv_connector"] |= {"name": "filesystem", "filesystem": {"path": str(tmp_path / "made")}}
    hostile.config["flight_recorder"]["folder"] = str(tmp_path / "made")
    hostile.config["plugins"] = {"blocked": ["scheduling"]}
    hostile.config["speculation"] |= {"name": "draft_model"}
    hostile.components |= {"speculation.name": hostile.components["scheduling.name"]}
    config, _ = recorded_config(hostile, name="x.flight")
    assert (config.model.path, config.model.trust_remote_code) == ("demo", False)
    assert (config.kv_connector.name, config.flight_recorder.folder) == ("none", "")
    assert not (tmp_path / "made").exists()


def with_request(record, number, /, **change):
    requests = list(record.requests)
    requests[number] = msgspec.structs.replace(requests[number], **change)
    return copy_of(record, requests=requests)


def with_event(record, **change):
    events = list(record.events)
    place = next(i for i, one in enumerate(events) if all(hasattr(one, name) for name in change))
    events[place] = msgspec.structs.replace(events[place], **change)
    return copy_of(record, events=events)


NAN = math.nan
HOSTILE = {
    "a circle of beginnings": lambda r: copy_of(
        with_request(with_request(r, 0, like=1, num_like=1), 1, like=0, num_like=1)
    ),
    "a beginning like itself": lambda r: with_request(r, 1, like=1, num_like=1),
    "a beginning like nothing": lambda r: with_request(r, 1, like=10**6, num_like=1),
    "a beginning of 2^40 tokens": lambda r: with_request(r, 1, like=0, num_like=2**40),
    "2^40 tokens": lambda r: with_request(r, 1, num_tokens=2**40),
    "2^30 tokens": lambda r: with_request(r, 1, num_tokens=2**30),
    "tokens below zero": lambda r: with_request(r, 1, num_tokens=-1),
    "another number": lambda r: with_request(r, 1, number=0),
    "an arrival that is no number": lambda r: with_request(r, 1, arrival_s=NAN),
    "an endless end": lambda r: with_request(r, 1, finish_s=math.inf),
    "a target that is no number": lambda r: with_request(r, 1, ttft_target_s=NAN),
    "a weight of nothing": lambda r: with_request(r, 1, weight=0.0),
    "an event that is no time": lambda r: with_event(r, now_s=NAN),
    "a request that is not there": lambda r: with_event(r, number=10**6),
    "half a number": lambda r: with_event(r, slots=b"\x00\x00"),
    "fewer counts than slots": lambda r: with_event(r, slots=bytes(8), counts=bytes(4)),
    "2^31 tokens at once": lambda r: with_event(r, num_emitted=b"\xff\xff\xff\x7f"),
    "2^40 blocks": lambda r: copy_of(r, num_blocks=2**40),
    "2^30 blocks": lambda r: copy_of(r, num_blocks=2**30),
    "no tokens in a block": lambda r: copy_of(r, block_size=0),
    "sequences without end": lambda r: copy_of(r, max_model_len=2**31, block_size=1),
    "2^40 sequences": lambda r: copy_of(
        r, config={**r.config, "engine": {**r.config["engine"], "max_num_seqs": 2**40}}
    ),
    "2^40 tokens in a step": lambda r: copy_of(
        r, config={**r.config, "engine": {**r.config["engine"], "max_num_batched_tokens": 2**40}}
    ),
    "drafts without end": lambda r: copy_of(r, max_draft_tokens=2**31),
    "a configuration of nothing": lambda r: copy_of(r, config={"engine": 3}),
    "a configuration of lists": lambda r: copy_of(r, config={"scheduling": [[[]]]}),
    "a large configuration": lambda r: copy_of(r, config={"x": [[]] * 2**21}),
    "no facts of the model": lambda r: copy_of(r, model={}),
    "other facts of the model": lambda r: copy_of(r, model={"__class__": 1}),
    "no capabilities": lambda r: copy_of(r, capabilities={}),
    "an unknown layout": lambda r: copy_of(r, capabilities={**r.capabilities, "layout": "os:system"}),
    "an empty frame": lambda r: copy_of(r, frame={}),
    "a frame of other things": lambda r: copy_of(r, frame=dict.fromkeys(r.frame, "x")),
    "an attribute of the class": lambda r: copy_of(r, frame={**r.frame, "scheduling": {"__class__": {"__init__": 1}}}),
    "a method of the policy": lambda r: copy_of(r, frame={**r.frame, "scheduling": {"order": 1}}),
    "a change that is none": lambda r: copy_of(r, events=[RecordedChange(1.0, b"\x91\x01", {}), *r.events]),
    "a change that is deep": lambda r: copy_of(r, events=[RecordedChange(1.0, b"\x91" * 60_000, {}), *r.events]),
    "a change of nothing": lambda r: copy_of(r, events=[RecordedChange.of(1.0, {}, {}), *r.events]),
    "text that is not": lambda r: copy_of(r, reason="x" * 2**17),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_record_is_refused_in_words_and_costs_little(record, tmp_path, capsys, name):
    path = tmp_path / "x.flight"
    hostile = HOSTILE[name](record)
    tracemalloc.start()
    try:
        assert replay(hostile, path) in (1, 2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert said.err.startswith("error: ") or said.out.startswith("The schedule is equal in ")
    assert peak < 200 * 2**20


def test_a_small_file_that_unfolds_without_end_is_refused(tmp_path, capsys):
    path = tmp_path / "x.flight"
    for plain in (bytes(MAX_BYTES + 1), b"\x91" * 2**20, b"\xdd\x7f\xff\xff\xff" + b"\x90" * 100):
        path.write_bytes(b"TRENCADIS-FLIGHT 2\n" + zlib.compress(plain, 1))
        assert main(["replay", str(path), "--show"]) == 2
        assert "x.flight is damaged: " in capsys.readouterr().err
