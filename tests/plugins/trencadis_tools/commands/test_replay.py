from __future__ import annotations

import json
import math

import msgspec
import pytest

from support.replays import record_of, recording_engine, serve_at_random
from trencadis.cli.main import main
from trencadis.records.flight_record import RecordedAttempt, encode_flight_record, int32s


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


def test_a_file_that_is_not_there_is_named(capsys):
    assert main(["replay", "/no/such.flight"]) == 2
    assert "/no/such.flight: No such file or directory" in capsys.readouterr().err


def test_other_settings_of_an_engine_that_drafts_need_to_know_how_often_drafts_are_right(tmp_path, capsys):
    engine = recording_engine(config={"engine.async_scheduling": False})
    serve_at_random(engine, 4, num_rounds=20)
    record = record_of(engine)
    record.config["speculation"]["name"], record.max_draft_tokens = "ngram", 2
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
