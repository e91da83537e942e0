from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trencadis.errors import ConfigError
from trencadis.link import Link
from trencadis_remote.process.__main__ import NUM_HEAPS
from trencadis_remote.process.messages import StartMessage
from trencadis_remote.process.process import EngineProcess
from trencadis_remote.process.wire import encode

ROOT = Path(__file__).parents[4]
START = StartMessage(tables={}, sources={}, log_levels=("critical", "critical"), python_path=None)


PARENT = """
import sys, time
from trencadis_remote.process.process import EngineProcess
process = EngineProcess(tables={}, sources={}, log_levels=("critical", "critical"))
print(process.pid, flush=True)
{end}
"""


def has_ended(pid: int, timeout_s: float) -> bool:
    """Wait for the end of a process that is no child of ours."""
    try:
        file = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([file], [], [], timeout_s)[0])
    finally:
        os.close(file)


def test_what_has_been_closed_keeps_no_descriptor_even_if_it_is_still_held() -> None:
    def descriptors() -> list[str]:
        return sorted(os.listdir("/proc/self/fd"))

    before = descriptors()
    process = EngineProcess(tables={}, sources={}, log_levels=("critical", "critical"))
    process.close()
    assert has_ended(process.pid, 0)
    assert descriptors() == before
    process.close()
    assert process.stalled == ""


@pytest.mark.parametrize("value", [object(), 2**70])
def test_a_value_that_cannot_travel_is_refused_in_words(value: object) -> None:
    with pytest.raises(ConfigError, match="cannot travel"):
        EngineProcess(tables={"scheduling": {"options": {"a": value}}}, sources={}, log_levels=("critical", "critical"))


def test_secrets_are_neither_arguments_nor_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRENCADIS_SERVER__API_KEYS", "ops:hush-hush")
    process = EngineProcess(tables={"cache": {"key": "hush-hush"}}, sources={}, log_levels=("critical", "critical"))
    try:
        for name in ("cmdline", "environ"):
            assert b"hush-hush" not in Path(f"/proc/{process.pid}/{name}").read_bytes()
    finally:
        process.close()


def test_a_process_that_nobody_closed_is_ended_with_its_owner() -> None:
    process = EngineProcess(tables={}, sources={}, log_levels=("critical", "critical"))
    pid = process.pid
    del process
    assert has_ended(pid, 5)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("how", ["killed", "left"])
def test_the_child_does_not_outlive_its_parent(how: str) -> None:
    end = "time.sleep(100)" if how == "killed" else "import os; os._exit(0)"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.replace("{end}", end)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    output: Any = parent.stdout
    pid = int(output.readline())
    if how == "killed":
        parent.send_signal(signal.SIGKILL)
    parent.wait(20)
    output.close()
    assert has_ended(pid, 20)


_THREADS = """
import ctypes, sys, threading
if "share" in sys.argv:
    from trencadis_remote.process.__main__ import share_heaps
    print(share_heaps())
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
barrier = threading.Barrier(6)
def work():
    barrier.wait()
    libc.malloc(ctypes.c_size_t(100_000))
    barrier.wait()
threads = [threading.Thread(target=work) for _ in range(6)]
for one in threads:
    one.start()
for one in threads:
    one.join()
libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b"w")))
libc.fflush(None)
"""


pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="malloc is not glibc's")


def _num_heaps(*arguments: str, **environment: str) -> tuple[int, str]:
    clean = {name: value for name, value in os.environ.items() if name not in {"MALLOC_ARENA_MAX", "GLIBC_TUNABLES"}}
    printed = subprocess.run(
        [sys.executable, "-u", "-c", _THREADS, *arguments],
        env=clean | environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return printed.count("<heap nr="), printed.partition("\n")[0]


def test_threads_of_the_engine_share_heaps() -> None:
    assert _num_heaps()[0] > NUM_HEAPS
    assert _num_heaps("share") == (NUM_HEAPS, "True")


@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    "environment",
    [{"MALLOC_ARENA_MAX": "4"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=4"}],
    ids=lambda one: next(iter(one)),
)
def test_the_environment_has_the_last_word(environment: dict[str, str]) -> None:
    assert _num_heaps("share", **environment) == (4, "False")


@pytest.mark.parametrize("words", [(), (encode(START),)], ids=["before it spoke", "after the start message"])
def test_the_process_shares_heaps_first_and_ends_with_its_parent_without_a_word(words: tuple[bytes, ...]) -> None:
    code = """
import sys
from trencadis_remote.process import __main__ as child
child.share_heaps = lambda: print("shared", file=sys.stderr)
child.main(int(sys.argv[1]))
"""
    own, other = socket.socketpair()
    link = Link(own)
    for word in words:
        link.send(word)
    link.close()
    with other:
        told = subprocess.run(
            [sys.executable, "-c", code, str(other.fileno())],
            pass_fds=(other.fileno(),),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert (told.returncode, told.stdout, told.stderr) == (1, "", "shared\n")
