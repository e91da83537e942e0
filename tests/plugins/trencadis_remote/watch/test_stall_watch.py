from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trencadis.activity import ACTIVITY, Activity, ActivityView, EnginePhase
from trencadis.clock import SimulatedClock
from trencadis_remote.watch import record_signal
from trencadis_remote.watch.record_signal import RECORD_SIGNAL, ignore_record_signal, record_at_signal
from trencadis_remote.watch.stall_watch import DUMP_SIGNAL, StallWatch, beat_s

WATCHDOG_S = 60.0


BUSY = [phase for phase in EnginePhase if not phase.has_no_limit and phase is not EnginePhase.IDLE]


class FakeProcess:
    """A process that takes signals and lives on."""

    pid = 2**31 - 7

    def __init__(self) -> None:
        self.signals: list[int] = []

    def poll(self) -> int | None:
        return None

    def send_signal(self, sig: int, /) -> None:
        self.signals.append(sig)


class Scene:
    """A watch with its own clock, and the engine that it watches."""

    def __init__(self) -> None:
        self.clock, self.process, self.view = SimulatedClock(), FakeProcess(), ActivityView()
        self.activity = Activity()
        self.activity.share(self.view.file)
        self.view.close_file()
        self.num_kills = 0
        self.watch = StallWatch(
            self.process, self.view, watchdog_s=WATCHDOG_S, clock=self.clock, kill=lambda: self.kill()
        )

    def kill(self) -> None:
        self.num_kills += 1

    def look_for(self, seconds: float, *, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Let time pass, with a look at each second."""
        for _ in range(round(seconds)):
            meanwhile()
            self.clock.advance(1.0)
            self.watch.look()

    @property
    def is_well(self) -> bool:
        return not (self.watch.stalled or self.watch.verdict or self.num_kills or self.process.signals)


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.mark.parametrize("phase", BUSY)
def test_no_progress_for_half_the_time_is_a_stall_and_for_all_of_it_the_end(
    scene: Scene, phase: EnginePhase, caplog: pytest.LogCaptureFixture
) -> None:
    scene.activity.begin_step(8123, phase)
    scene.look_for(29)
    assert scene.is_well
    scene.look_for(3)
    assert scene.watch.stalled == f"stalled: step 8123 for 31 s in {phase.text}"
    assert scene.process.signals == [DUMP_SIGNAL, RECORD_SIGNAL]
    assert (scene.num_kills, scene.watch.verdict) == (0, "")
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert f"stalled: step 8123 for 30 s in {phase.text}; it is killed after 60 s" in record.getMessage()
    scene.look_for(30)
    assert scene.num_kills == 1
    assert scene.watch.verdict == (
        f"hung: no progress in step 8123 for 60 s in {phase.text} ([engine] watchdog_s = 60); it was killed"
    )
    assert scene.process.signals == [DUMP_SIGNAL, RECORD_SIGNAL], "stacks are shown once"


def test_the_component_that_is_being_called_is_named(scene: Scene) -> None:
    scene.activity.begin_step(5, EnginePhase.SCHEDULING)
    scene.activity.engine.enter(scene.activity.label("scheduling policy X of package Y 1.2"))
    scene.look_for(62)
    where = "step 5 for 60 s in scheduling while scheduling policy X of package Y 1.2 was being called"
    assert where in scene.watch.verdict


def test_an_idle_engine_that_does_not_beat_is_noticed_sooner(scene: Scene) -> None:
    scene.activity.begin(EnginePhase.IDLE)
    scene.look_for(14)
    assert scene.is_well
    scene.look_for(3)
    assert "in idle" in scene.watch.stalled
    scene.look_for(15)
    assert scene.num_kills == 1


def test_an_idle_engine_that_beats_is_well_for_ever(scene: Scene) -> None:
    scene.look_for(1000, meanwhile=lambda: scene.activity.begin(EnginePhase.IDLE))
    assert scene.is_well


@pytest.mark.representatives(2)
@pytest.mark.parametrize(
    "phase", [EnginePhase.LOADING, EnginePhase.STARTING, EnginePhase.COMPILING, EnginePhase.CLOSING]
)
def test_an_engine_that_loads_or_compiles_is_well_for_ever(scene: Scene, phase: EnginePhase) -> None:
    scene.activity.begin(phase)
    scene.look_for(10_000)
    assert scene.is_well


def test_one_that_is_stopped_while_it_compiles_is_stalled(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.activity.begin(EnginePhase.COMPILING)
    scene.look_for(100)
    assert scene.is_well
    monkeypatch.setattr("trencadis_remote.watch.stall_watch.is_stopped", lambda _: True)
    scene.look_for(62)
    assert "in compiling" in scene.watch.verdict


def test_one_that_a_signal_has_stopped_is_killed_after_five_seconds(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.activity.begin_step(7, EnginePhase.FORWARD)
    monkeypatch.setattr("trencadis_remote.watch.stall_watch.is_stopped", lambda _: True)
    scene.look_for(4)
    assert scene.watch.stalled
    assert scene.num_kills == 0
    scene.look_for(3)
    assert scene.num_kills == 1


def test_ranks_that_start_again_for_long_are_told_of_and_nobody_is_killed(scene: Scene) -> None:
    scene.activity.begin(EnginePhase.RESTARTING)
    scene.look_for(3)
    assert scene.is_well
    scene.look_for(10_000, meanwhile=scene.activity.beat)
    assert scene.watch.stalled.startswith("starting its ranks again, for 100")
    assert scene.num_kills == 0
    scene.activity.begin(EnginePhase.REQUESTS)
    scene.look_for(1)
    assert scene.is_well


def test_slow_steps_may_be_followed_by_slower_ones(scene: Scene) -> None:
    scene.activity.end_step(EnginePhase.COMMITTING, took_s=10.0)
    scene.activity.begin_step(7, EnginePhase.FORWARD)
    scene.look_for(199)
    assert scene.is_well
    scene.look_for(3)
    assert scene.watch.stalled
    scene.look_for(197)
    assert scene.num_kills == 0
    scene.look_for(3)
    assert scene.num_kills == 1


def test_one_that_goes_on_is_well_again_and_its_next_stall_is_shown_again(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.activity.begin(EnginePhase.FORWARD)
    scene.look_for(40)
    scene.activity.begin(EnginePhase.COMMITTING)
    scene.look_for(1)
    assert scene.watch.stalled == ""
    assert "The engine goes on" in caplog.records[-1].getMessage()
    scene.look_for(32)
    assert scene.watch.stalled
    assert scene.process.signals.count(DUMP_SIGNAL) == 2


def test_time_in_which_nobody_looked_does_not_count(scene: Scene) -> None:
    """This process was stopped together with the engine's, or its machine slept."""
    scene.activity.begin(EnginePhase.FORWARD)
    scene.look_for(2)
    for _ in range(10):
        scene.clock.advance(3600.0)
        scene.watch.look()
    assert scene.is_well


def test_a_short_watchdog_is_looked_after_often() -> None:
    assert (beat_s(120.0), beat_s(1.0)) == (1.0, 0.1)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux")
def test_the_state_of_a_process_is_in_the_log(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    import subprocess
    import sys

    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        child.send_signal(signal.SIGSTOP)
        scene.process.pid = child.pid
        while not Path(f"/proc/{child.pid}/status").read_text().partition("State:\t")[2].startswith("T"):
            pass
        scene.activity.begin(EnginePhase.LOADING)
        scene.look_for(32)
        assert "is in state T (stopped), waiting in" in caplog.text
    finally:
        child.kill()
        child.communicate()


class Recorder:
    """Notes what it is told to write, and on which thread."""

    def __init__(self):
        self.written, self.done = [], threading.Event()

    def dump(self, reason, cause):
        self.written.append((reason, cause, threading.current_thread().name))
        self.done.set()


@pytest.fixture(autouse=True)
def handlers():
    before = signal.getsignal(RECORD_SIGNAL)
    yield
    sink = signal.set_wakeup_fd(-1)
    signal.signal(RECORD_SIGNAL, before)
    if sink >= 0:
        os.close(sink)  # the thread ends


@pytest.mark.parametrize(("beats", "reason"), [(0, "stall"), (1, "signal")])
def test_a_signal_has_another_thread_write_the_record_and_say_whether_the_engine_hangs(monkeypatch, beats, reason):
    recorder = Recorder()
    monkeypatch.setattr(record_signal.time, "sleep", lambda _: [ACTIVITY.beat() for _ in range(beats)])
    record_at_signal([recorder.dump])
    signal.raise_signal(RECORD_SIGNAL)
    assert recorder.done.wait(30)
    assert recorder.written == [(reason, "signal SIGUSR2", "trencadis-flight-record")]


def test_before_there_is_an_engine_the_signal_does_nothing():
    ignore_record_signal()
    signal.raise_signal(RECORD_SIGNAL)
    assert time.monotonic() > 0, "the process lives"
