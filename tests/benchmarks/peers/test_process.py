"""The protocol, against a driver that answers, fails, dies, hangs and chatters as it is told."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from peers.process import DriverError, DriverProcess

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"

DRIVER = """
import os, subprocess, sys, time
from peers.drivers.protocol import serve

def load(chatter=False):
    if chatter:
        print("a library says hello")
        os.write(1, b"and a native one\\n")
    return {"pid": os.getpid()}

def fail():
    raise ValueError("nothing fits")

def die():
    print("last words", file=sys.stderr, flush=True)
    os._exit(3)

def burn(seconds, child=False):
    code = f"import time\\nwhile time.process_time() < {seconds}: pass"
    if child:
        worker = subprocess.Popen([sys.executable, "-c", code + "\\ninput()"], stdin=subprocess.PIPE)
        while cpu(worker.pid) < seconds:
            os.sched_yield()
        return {"worker": worker.pid}
    exec(f"import time\\nuntil = time.process_time() + {seconds}\\nwhile time.process_time() < until: pass")
    return {}

def compile(seconds):
    subprocess.run([sys.executable, "-c", f"import time\\nwhile time.process_time() < {seconds}: pass"], check=True)
    return {}

def cpu(pid):
    return time.clock_gettime((~pid << 3) | 2)

def hang():
    time.sleep(1000)

serve(load=load, fail=fail, die=die, burn=burn, hang=hang, compile=compile)
"""

ENGINE = """
import sys
from peers.drivers.protocol import Opened, drive

def open_engine(wanted):
    if wanted.options.get("fails"):
        raise ValueError("no such model")
    score = (lambda texts: [[-0.5] * (len(text) - 1) for text in texts]) if wanted.precision == "fp32" else None
    return Opened({"made of": wanted.model}, lambda prompts, n: [[len(p)] * n for p in prompts], score)

drive(open_engine)
"""
WANTED = {"model": "m", "threads": 1, "max_num_seqs": 2, "max_model_len": 8, "max_num_tokens": 16}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], DriverProcess]]:
    """Starts a driver of a program."""
    env, started = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}, []

    def make(program: str) -> DriverProcess:
        command = [sys.executable, "-c", program]
        started.append(DriverProcess(command, env=env, log=tmp_path / "log", directory=tmp_path))
        return started[-1]

    yield make
    for process in started:
        process.close()


@pytest.fixture
def driver(start: Callable[[str], DriverProcess]) -> DriverProcess:
    return start(DRIVER)


@pytest.fixture
def engine(start: Callable[[str], DriverProcess]) -> DriverProcess:
    return start(ENGINE)


def alive(pid: int) -> bool:
    """Return whether a process runs on; one that has ended counts as gone before its parent, or nobody, has asked for its status."""
    until_s = time.monotonic() + 60.0
    while time.monotonic() < until_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state in "ZX":
            return False
        time.sleep(0.02)
    return True


def test_a_run_gives_tokens_and_its_times(engine: DriverProcess) -> None:
    assert engine.ask("load", timeout_s=60, precision="fp32", options={}, **WANTED)["versions"] == {"made of": "m"}
    reply = engine.ask("run", timeout_s=60, prompts=[[1, 2, 3], [4]], output_len=2)
    assert reply["tokens"] == [[3, 3], [1, 1]]
    assert reply["wall_s"] >= 0
    assert reply["cpu_s"] >= 0
    assert engine.ask("score", timeout_s=60, texts=[[1, 2, 3], [4]])["logprobs"] == [[-0.5, -0.5], []]


def test_an_engine_that_cannot_score_says_so_and_runs(engine: DriverProcess) -> None:
    with pytest.raises(DriverError, match="ValueError: no such model"):
        engine.ask("load", timeout_s=60, precision="int8", options={"fails": True}, **WANTED)
    engine.ask("load", timeout_s=60, precision="int8", options={}, **WANTED)
    with pytest.raises(DriverError, match="does not tell the probability"):
        engine.ask("score", timeout_s=60, texts=[[1, 2]])
    assert engine.ask("run", timeout_s=60, prompts=[[1]], output_len=1)["tokens"] == [[1]]


def test_what_libraries_print_and_what_fails_does_not_get_between_the_lines(
    driver: DriverProcess, tmp_path: Path
) -> None:
    pid = driver.ask("load", timeout_s=60, chatter=True)["pid"]
    for command, words in (("fail", "ValueError: nothing fits"), ("nonsense", "KeyError: 'nonsense'")):
        with pytest.raises(DriverError, match=words):
            driver.ask(command, timeout_s=60)
    assert driver.ask("load", timeout_s=60)["pid"] == pid
    assert "and a native one" in (tmp_path / "log").read_text()
    memory = driver.memory_bytes()
    assert 2**20 < memory["rss"] <= memory["peak_rss"]


def test_a_driver_that_dies_is_told_with_status_and_last_words(driver: DriverProcess) -> None:
    with pytest.raises(DriverError, match="status 3: last words"):
        driver.ask("die", timeout_s=60)
    with pytest.raises(DriverError, match="status 3"):
        driver.ask("load", timeout_s=60)


def test_a_driver_that_hangs_is_ended_and_one_that_is_not_there_is_told(driver: DriverProcess, tmp_path: Path) -> None:
    pid = driver.ask("load", timeout_s=60)["pid"]
    with pytest.raises(DriverError, match=r"hang took more than 0\.2 s"):
        driver.ask("hang", timeout_s=0.2)
    assert not alive(pid)
    with pytest.raises(DriverError, match="no-such-program cannot be run"):
        DriverProcess(["no-such-program"], env={}, log=tmp_path / "log", directory=tmp_path)


def test_cpu_time_counts_the_driver_and_its_workers(driver: DriverProcess) -> None:
    driver.ask("load", timeout_s=60)
    before_s = driver.ended_cpu_s()
    driver.ask("compile", timeout_s=60, seconds=0.3)
    assert driver.ended_cpu_s() - before_s >= 0.3 - 3 / os.sysconf("SC_CLK_TCK"), "what has ended counts apart"
    assert 0.1 <= driver.ask("burn", timeout_s=60, seconds=0.2)["cpu_s"] < 5
    reply = driver.ask("burn", timeout_s=60, seconds=0.3, child=True)
    assert reply["cpu_s"] >= 0.2
    driver.close()
    assert not alive(reply["worker"])


def test_a_driver_that_is_paused_does_nothing_until_it_may_go_on(driver: DriverProcess) -> None:
    driver.ask("load", timeout_s=60)
    driver.pause()
    until_s = time.monotonic() + 60.0
    while (before_s := driver.cpu_s()) != driver.cpu_s():  # a signal takes a moment to arrive
        assert time.monotonic() < until_s, "it goes on"
    assert driver.cpu_s() <= before_s + 0.01  # what it did before the signal came may be counted late
    driver.resume()
    driver.ask("burn", timeout_s=60, seconds=0.05)
    assert driver.cpu_s() >= before_s + 0.02
