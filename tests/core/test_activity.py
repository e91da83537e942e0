from __future__ import annotations

import os
import subprocess
import sys

import pytest

from trencadis.activity import Activity, ActivityReading, ActivityView, EnginePhase


def shared() -> tuple[Activity, ActivityView]:
    activity, view = Activity(), ActivityView()
    activity.share(view.file)
    view.close_file()
    return activity, view


def test_a_view_shows_what_was_begun_and_each_phase_is_progress():
    activity, view = shared()
    assert view.read() == ActivityReading()
    activity.begin(EnginePhase.SCHEDULING)
    before = view.read()
    activity.begin_step(8123, EnginePhase.FORWARD)
    after = view.read()
    assert (after.step, after.phase, after.phase.text) == (8123, EnginePhase.FORWARD, "backend.forward")
    assert after.beat == before.beat + 1
    assert view.read() == after


def test_calls_nest_and_each_thread_has_its_own():
    activity, view = shared()
    policy, inner, sampler = map(activity.label, ("policy X of y 1.2", "policy Z of y 1.2", "sampler S of t 3"))
    outer = activity.engine.enter(policy)
    within = activity.engine.enter(inner)
    activity.device.enter(sampler)
    assert view.read().calls == ("policy Z of y 1.2", "sampler S of t 3")
    activity.engine.leave(within)
    assert view.read().calls == ("policy X of y 1.2", "sampler S of t 3")
    activity.engine.leave(outer)
    activity.device.leave()
    assert view.read().calls == ()


def test_what_was_noted_before_sharing_is_there_afterwards():
    activity, view = Activity(), ActivityView()
    activity.engine.enter(activity.label("early"))
    activity.begin(EnginePhase.LOADING)
    activity.share(view.file)
    reading = view.read()
    assert (reading.calls, reading.phase) == (("early",), EnginePhase.LOADING)


@pytest.mark.parametrize("text", ["", "ü" * 500, "half \ud800", "x" * 10_000])
def test_a_label_is_cut_and_never_breaks_the_memory(text):
    activity, view = shared()
    activity.engine.enter(activity.label(text))
    activity.device.enter(activity.label("next"))
    first, second = view.read().calls
    assert len(first.encode()) <= 256
    assert second == "next"


def test_a_label_has_one_number_and_too_many_name_nothing():
    activity, _ = shared()
    numbers = [activity.label(f"component {number}") for number in range(300)]
    assert activity.label("component 7") == numbers[7]
    assert len(set(numbers[:255])) == 255
    assert set(numbers[255:]) == {0}


def test_the_slow_step_is_remembered_and_fades():
    activity, view = shared()
    activity.end_step(EnginePhase.COMMITTING, took_s=2.0)
    assert view.read().slow_step_s == 2.0
    for _ in range(70):
        activity.end_step(EnginePhase.COMMITTING, took_s=0.01)
    assert 0.9 < view.read().slow_step_s < 1.1
    for _ in range(1000):
        activity.end_step(EnginePhase.COMMITTING, took_s=0.01)
    assert view.read().slow_step_s == pytest.approx(0.01, rel=0.02)


def test_another_process_writes_and_the_last_is_readable_when_it_has_ended():
    view = ActivityView()
    code = (
        "import os, sys; from trencadis.activity import ACTIVITY, EnginePhase\n"
        f"ACTIVITY.share({view.file})\n"
        "ACTIVITY.begin_step(5, EnginePhase.SCHEDULING)\n"
        "ACTIVITY.engine.enter(ACTIVITY.label('policy X'))\n"
        "os._exit(3)"
    )
    done = subprocess.run([sys.executable, "-c", code], pass_fds=(view.file,), check=False)
    view.close_file()
    assert done.returncode == 3
    reading = view.read()
    assert (reading.step, reading.phase) == (5, EnginePhase.SCHEDULING)
    assert reading.called == " while policy X was being called"


def test_how_far_a_warm_up_is_can_be_read_and_is_progress():
    activity, view = shared()
    activity.begin(EnginePhase.COMPILING)
    beat = view.read().beat
    activity.advance(120, 416)
    reading = view.read()
    assert (reading.done, reading.total, reading.phase) == (120, 416, EnginePhase.COMPILING)
    assert reading.beat > beat


def test_a_closed_view_has_the_last_that_was_done_and_no_descriptor():
    def descriptors():
        return sorted(os.listdir("/proc/self/fd"))

    before = descriptors()
    activity, view = shared()
    activity.begin_step(12, EnginePhase.FORWARD)
    activity._attach(memoryview(bytearray(len(activity._bytes))))  # the engine's side is another process's
    view.close()
    view.close()
    assert view.read().step == 12
    assert descriptors() == before


def test_the_part_of_loading_that_runs_can_be_read_in_both_processes():
    activity, view = shared()
    assert view.read().part == ""
    activity.begin_part("weights")
    before = view.read()
    activity.begin_part("warm-up")
    assert (before.part, view.read().part, activity.read().part) == ("weights", "warm-up", "warm-up")
    assert view.read().beat == before.beat + 1
