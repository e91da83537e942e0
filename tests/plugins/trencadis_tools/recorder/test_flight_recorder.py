from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from support.replays import record_of, recording_engine, serve_at_random
from trencadis.config.schema import FlightRecorderConfig
from trencadis.engine.step import SchedulingChanged
from trencadis.errors import BackendError, InvalidRequestError
from trencadis.interfaces import SchedulingPolicy
from trencadis.records import Request, SamplingParams
from trencadis_testing.doubles import ScriptedSpeculator
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend
from trencadis_tools.recorder.flight_files import SUFFIX, FlightFiles, default_folder
from trencadis_tools.recorder.flight_record import (
    RecordedAttempt,
    RecordedChange,
    RecordedCommit,
    RecordedEnd,
    RecordedFailure,
    decode_flight_record,
)
from trencadis_tools.replay.replayed_engine import recorder_of


def request(name, length=6, max_tokens=4, **terms):
    return Request(
        request_id=name, prompt_token_ids=(5,) * length, params=SamplingParams(max_tokens=max_tokens), **terms
    )


def files_in(folder):
    return sorted(path.name for path in folder.iterdir())


def written():
    """Wait for the threads that write records."""
    for thread in threading.enumerate():
        if thread.name == "trencadis-flight-record":
            thread.join(30)


def test_each_plan_and_commit_is_recorded_with_its_times():
    engine = recording_engine()
    engine.add(request("one"))
    drain(engine)
    record = record_of(engine)
    plans = [one for one in record.events if isinstance(one, RecordedAttempt) and one.is_plan]
    commits = [one for one in record.events if isinstance(one, RecordedCommit)]
    assert len(plans) == len(commits) == record.num_steps == engine.totals.num_steps
    assert [np.frombuffer(one.counts, "<i4").tolist() for one in plans[:2]] == [[6], [1]]
    assert plans[0].admitted == (0,)
    assert [one.num_free_blocks for one in plans[:2]] == [24, 22]
    for before, after in zip(record.events, record.events[1:], strict=False):
        assert before.now_s <= after.now_s
    assert all(one.wait_s < one.now_s < one.end_s and one.plan_s > 0 for one in commits)


def test_a_record_says_what_became_of_each_request():
    engine = recording_engine()
    engine.add(request("ends", tenant="ann", cache_salt="pepper", priority=3))
    engine.add(request("given up", max_tokens=50))
    for _ in range(3):
        engine.step()
    engine.abort("given up")
    drain(engine)
    engine.add(request("waits"))
    ended, given_up, waits = record_of(engine).requests
    assert (ended.finish_reason, ended.num_output_tokens, ended.tenant, ended.priority) == ("length", 4, "ann", 3)
    assert ended.cache_salt == "\0" + "0"
    assert given_up.finish_reason == "abort"
    assert given_up.cache_salt is None
    assert ended.arrival_s < ended.first_token_s < ended.finish_s
    assert (waits.finish_reason, waits.finish_s, waits.num_tokens) == ("", 0.0, 6)
    assert (given_up.like, given_up.num_like >= 6) == (ended.number, True) or ended.like == given_up.number


def test_two_segments_are_kept_and_no_more():
    engine = recording_engine(config={"flight_recorder.num_steps": 5})
    for number in range(12):
        engine.add(request(str(number), max_tokens=9))
    sizes = []
    while engine.has_work:
        engine.step()
        sizes.append(record_of(engine).num_steps)
    assert max(sizes) <= 2 * (5 + 2), "and what was in flight"
    assert min(sizes[10:]) >= 5


def test_requests_with_long_texts_shorten_the_record():
    engine = recording_engine(config={"flight_recorder.num_steps": 10**6, "flight_recorder.max_bytes": 2**20})
    recorder = recorder_of(engine)
    recorder._max_bytes = 2000
    for number in range(40):
        engine.add(request(str(number), length=40, max_tokens=2))
        drain(engine)
    assert len(record_of(engine).requests) < 20


def test_off_keeps_nothing_and_says_so():
    engine = recording_engine(config={"flight_recorder.num_steps": 0})
    stage = engine.stage("flight_recorder")
    assert not any(getattr(act, "__self__", None) is stage for acts in vars(engine._stages).values() for act in acts)
    serve_at_random(engine, 1, num_rounds=10)
    with pytest.raises(InvalidRequestError, match="keeps no flight record"):
        engine.answer("flight_record", {})


def test_a_record_on_request_is_a_file_of_its_own(tmp_path):
    engine = recording_engine(config={"flight_recorder.folder": str(tmp_path / "records"), "cache.key": "pepper"})
    serve_at_random(engine, 1, num_rounds=20)
    (path,) = engine.answer("flight_record", {})["paths"]
    record = decode_flight_record(Path(path).read_bytes())
    assert (record.reason, record.num_steps) == ("request", engine.totals.num_steps + 1)
    assert record.components["scheduling.name"][0] == "fair_share"
    assert "key" not in record.config["cache"]
    assert "pepper" not in str(record)
    assert Path(path).stat().st_mode & 0o077 == 0
    assert files_in(tmp_path / "records") == [Path(path).name]


def test_a_fault_writes_a_record_and_other_requests_go_on(tmp_path):
    def fails(batch, one):
        if 7 in one.query_lens.tolist():
            raise RuntimeError("seven tokens")

    backend = FakeBackend(max_model_len=80, strict=False, fails=fails)
    engine = recording_engine(backend=backend, config={"flight_recorder.folder": str(tmp_path)})
    engine.add(request("good"))
    engine.add(Request(request_id="bad", prompt_token_ids=(6,) * 7, params=SamplingParams(max_tokens=4)))
    ended = drain(engine)
    written()
    assert ended["good"].finish_reason.value == "length"
    assert ended["bad"].finish_reason.value == "error"
    (name,) = files_in(tmp_path)  # the second failure came within the pause
    assert name.endswith(f"-fault{SUFFIX}")
    record = decode_flight_record((tmp_path / name).read_bytes())
    assert record.cause == "step 0 failed: StepFailedError"
    assert isinstance(record.events[-1], RecordedFailure)
    assert "seven tokens" not in str(record)


class Failing(SchedulingPolicy):
    """Cannot say who is first."""

    def order(self, view):
        raise RuntimeError("no order")


def test_a_strategy_that_fails_for_good_leaves_a_record_that_cannot_be_replayed(tmp_path):
    config = {"scheduling.name": f"{__name__}:Failing", "scheduling.fallback": "", "flight_recorder.num_steps": 3}
    engine = recording_engine(config={**config, "flight_recorder.folder": str(tmp_path)})
    engine.add(request("one"))
    assert drain(engine)["one"].finish_reason.value == "error"
    written()
    (name,) = files_in(tmp_path)
    record = decode_flight_record((tmp_path / name).read_bytes())
    assert (record.reason, record.cause) == ("fault", "a strategy failed, and every live request ends")
    assert record.obstacles == ["a strategy failed for good: RuntimeError"]
    assert record_of(engine).obstacles == record.obstacles, "it lasts"


def test_the_end_of_a_request_is_an_event_if_a_client_asked_for_it():
    engine = recording_engine()
    for name in ("abort", "stop", "length", "token"):
        params = SamplingParams(max_tokens=4, stop_token_ids=tuple(range(97)) if name == "token" else ())
        engine.add(Request(request_id=name, prompt_token_ids=(5,) * 6, params=params))
    engine.step()
    engine.abort("abort")
    engine.stop("stop")
    drain(engine)
    record = record_of(engine)
    assert [one.finish_reason for one in record.requests] == ["abort", "stop", "length", "stop"]
    ends = [one for one in record.events if isinstance(one, RecordedEnd)]
    assert [(one.number, one.is_complete) for one in ends] == [(0, False), (1, True)]


def test_what_cannot_be_written_is_said_once_and_harms_nothing(tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    engine = recording_engine(config={"flight_recorder.folder": str(tmp_path / "file")})
    engine.add(request("one"))
    for _ in range(2):
        with pytest.raises(BackendError, match="could not be written"):
            engine.answer("flight_record", {})
    assert drain(engine)["one"].finish_reason.value == "length"
    said = [one for one in caplog.records if "No flight record could be written" in one.getMessage()]
    assert len(said) == 1
    assert "NotADirectoryError" in said[0].getMessage() or "FileExistsError" in said[0].getMessage()


def test_a_full_disk_leaves_no_half_of_a_file(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    files = FlightFiles(FlightRecorderConfig(folder=str(tmp_path)))
    engine = recording_engine()
    engine.add(request("one"))
    monkeypatch.setattr(os, "fsync", full)
    assert files.write(record_of(engine)) is None
    assert files_in(tmp_path) == []
    monkeypatch.undo()
    assert files.write(record_of(engine)) is not None


def test_the_oldest_files_of_a_reason_go_first_and_others_stay(tmp_path):
    files = FlightFiles(FlightRecorderConfig(folder=str(tmp_path), max_files=2))
    (tmp_path / "notes.txt").write_text("mine")
    record, kept = record_of(recording_engine()), []
    for moment, reason in enumerate(["fault", "stall", "signal", *["request"] * 5, "fault"]):
        record.written_at, record.reason = 1e9 + moment, reason
        kept.append(files.write(record).name)
    assert files_in(tmp_path) == sorted([*kept[:3], *kept[-3:], "notes.txt"])


def test_faults_within_the_pause_are_one_record():
    files = FlightFiles(FlightRecorderConfig(pause_s=1e6))
    assert [files.may_write() for _ in range(3)] == [True, False, False]
    eager = FlightFiles(FlightRecorderConfig(pause_s=0))
    assert [eager.may_write() for _ in range(3)] == [True, True, True]


def test_files_lie_where_the_environment_keeps_state(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "trencadis" / "flight-records"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(default_folder()) == "/home/someone/.local/state/trencadis/flight-records"


def test_drafts_are_counted_and_not_kept():
    engine = make_engine(speculator=ScriptedSpeculator(lambda tokens: [5, 5]))
    engine.add(request("one", max_tokens=12))
    drain(engine)
    entries = [entry for entry in recorder_of(engine)._segment.entries if entry[0] == 2]
    assert any(entry[6] is not None for entry in entries)
    kept = {type(value) for entry in entries for value in entry}
    assert kept <= {int, float, str, type(None), np.ndarray, np.int64}, "nothing that the garbage collector follows"
    assert record_of(engine).max_draft_tokens == 3


def change_scheduling(engine, **table):
    engine.answer("set_scheduling", {"table": table, "source": "test", "may_import": True})


def test_a_change_of_scheduling_is_an_event_with_the_code_that_is_in_force_since():
    engine = recording_engine(config={"scheduling.name": "fair_share"})
    change_scheduling(engine, name="fcfs", options={"victim": "cheapest"})
    change_scheduling(engine, shadow="priority")
    record = record_of(engine)
    first, second = record.events
    assert record.scheduling is None
    assert isinstance(first, RecordedChange)
    assert (first.table["name"], first.table["options"]["victim"], "shadow" in first.table) == (
        "fcfs",
        "cheapest",
        False,
    )
    assert second.table == {"shadow": "priority"}
    assert {path: code[0] for path, code in second.components.items()} == {
        "scheduling.name": "fcfs",
        "scheduling.fallback": "fcfs",
        "scheduling.shadow": "priority",
    }
    assert record.obstacles == []


def test_options_that_no_record_can_hold_are_an_obstacle():
    engine = recording_engine()
    for option in (object(), "x" * 2**17):
        change = {"name": "mine", "options": {"a": option}}
        recorder_of(engine).hear(SchedulingChanged(change=change, in_force={}, components={}))
    assert record_of(engine).obstacles == ["scheduling was changed by options that no record can hold"]


def test_an_obstacle_goes_with_the_steps_that_it_was_in_unless_it_lasts():
    engine = recording_engine(config={"flight_recorder.num_steps": 3})
    recorder_of(engine).obstacle("passing")
    recorder_of(engine).obstacle("lasting", lasts=True)
    assert record_of(engine).obstacles == ["lasting", "passing"]
    engine.add(request("one", max_tokens=20))
    drain(engine)
    assert record_of(engine).obstacles == ["lasting"]
