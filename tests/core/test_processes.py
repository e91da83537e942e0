from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.eventually import eventually
from trencadis.clock import SimulatedClock
from trencadis.processes import LineProcess, RestartLimit, describe_exit, end_process, is_stopped, kill_process, spawn

_ECHO = """
import os, sys, time
name = sys.stdin.readline().strip()
for line in sys.stdin:
    line = line.strip()
    if line == "leave":
        sys.exit(3)
    if line == "hang":
        time.sleep(600)
    print(name, os.environ.get("GREETING", ""), line, flush=True)
"""

# ----------------------------------------------------------------------------------------------------- start and end


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-9, "was killed by SIGKILL; often the kernel ran out of memory"),
        (-11, "was killed by SIGSEGV"),
        (-250, "was killed by signal 250"),
    ],
)
def test_an_exit_code_is_said_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words


@pytest.fixture
def child() -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    made: list[subprocess.Popen[bytes]] = []

    def make(stdin: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
        made.append(spawn("code", "-q", environment=os.environ, stdin=stdin, stdout=subprocess.PIPE))
        return made[-1]

    yield make
    for one in made:
        end_process(one)


def test_a_child_leads_a_session_and_is_killed_with_what_it_has_started(
    child: Callable[..., subprocess.Popen[bytes]],
) -> None:
    process = child()
    assert os.getsid(process.pid) == process.pid
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)\n")
    grandchild = int(process.stdout.readline().split()[-1])  # after the prompt
    assert kill_process(process) == -signal.SIGKILL
    assert kill_process(process) == -signal.SIGKILL, "twice is once"
    eventually(lambda: not Path(f"/proc/{grandchild}/exe").exists())


def test_a_child_that_a_signal_has_stopped_is_known_and_ended(child: Callable[..., subprocess.Popen[bytes]]) -> None:
    process = child()
    assert not is_stopped(process.pid)
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: is_stopped(process.pid))
    end_process(process)
    end_process(process)
    assert process.poll() == -signal.SIGKILL
    assert not is_stopped(process.pid)


# ---------------------------------------------------------------------------------------------- a line for a line


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[LineProcess]:
    (tmp_path / "echo.py").write_text(_ECHO)
    made = LineProcess(tmp_path / "echo.py", environment={"GREETING": "says"}, setup=lambda: b"echo\n")
    yield made
    made.close()


def test_each_line_is_answered_by_a_process_that_was_told_what_it_needs(echo: LineProcess) -> None:
    assert [echo.ask(line, timeout_s=60) for line in (b"one\n", b"two\n")] == [b"echo says one\n", b"echo says two\n"]


@pytest.mark.parametrize(("line", "timeout_s", "code"), [(b"leave\n", 60.0, None), (b"hang\n", 0.2, -signal.SIGKILL)])
def test_a_process_that_leaves_or_takes_too_long_is_another_for_the_next_line(
    echo: LineProcess, line: bytes, timeout_s: float, code: int | None
) -> None:
    assert isinstance(echo.ask(b"one\n", timeout_s=60), bytes)
    ended = echo.ask(line, timeout_s=timeout_s)
    assert ended == code or (code is None and ended in (3, -signal.SIGKILL))
    assert echo.ask(b"two\n", timeout_s=60) == b"echo says two\n"


def test_a_line_process_ends_with_this_one(tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(_ECHO)
    code = f"""
import os
from pathlib import Path
from trencadis import processes
made = processes.LineProcess(Path({str(tmp_path / "echo.py")!r}), environment=os.environ, setup=lambda: b"echo\\n")
made.ask(b"one\\n", timeout_s=60)
print(made._process.pid)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not Path(f"/proc/{int(run.stdout)}").exists()


# ------------------------------------------------------------------------------------------------------- start again


def test_restarts_beyond_the_limit_wait_for_the_window() -> None:
    clock = SimulatedClock()
    limit = RestartLimit(max_restarts=2, window_s=100.0, now_s=clock.now_s)
    assert limit.delay_s() == 0.0
    clock.advance(10.0)
    assert limit.delay_s() == 0.0
    clock.advance(5.0)
    assert limit.delay_s() == 85.0  # the first was at 0
    assert limit.delay_s() == 95.0  # the second was at 10
    clock.advance(300.0)
    assert limit.delay_s() == 0.0


def test_none_is_begun_where_none_is_allowed() -> None:
    assert RestartLimit(max_restarts=0, window_s=100.0, now_s=SimulatedClock().now_s).delay_s() is None


def test_restarts_count_until_the_window_is_over() -> None:
    clock = SimulatedClock()
    limit = RestartLimit(max_restarts=1, window_s=100.0, now_s=clock.now_s)
    assert (limit.note(), limit.note(), limit.num_recent) == (True, False, 2)
    clock.advance(100.0)
    assert (limit.num_recent, limit.note()) == (0, True)
