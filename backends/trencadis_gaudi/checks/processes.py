"""Runs the checks of a group in a separate process; a crash or hang becomes the finding of the check.

After it, the remaining checks run in a new process, a limited number of times.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import attrs

from trencadis.processes import kill_session
from trencadis_gaudi.checks.records import Check, Found, Result
from trencadis_gaudi.checks.table import START, checks_of

__all__ = ["CHILD", "run_group"]

CHILD = (sys.executable, "-P", "-m", "trencadis_gaudi.checks.child")
_MOST_DEATHS = 3
_EXIT_S = 60.0
"""Time limit for the end of a process after its last check, seconds."""
_TAIL_LINES = 3


@attrs.define
class _Ended:
    """End of a process.

    Attributes:
        running: Name of the check that was running; empty: none.
        how: Abnormal end, in words; empty: normal.
        seconds: Time since that check started, seconds.
    """

    running: str = ""
    how: str = ""
    seconds: float = 0.0


def run_group(
    group: str,
    options: Mapping[str, Any],
    *,
    timeout_s: float,
    note: Callable[[Result], None],
    only: Sequence[str] = (),
    child: Sequence[str] = CHILD,
) -> None:
    """Run the checks of a group; starts no process without checks.

    Args:
        group: Group of checks: a mode, ``software`` or ``cards``.
        options: Table ``[backend.gaudi]``.
        timeout_s: Time limit of a check, seconds.
        only: Names of the checks to run; empty: all.
        note: Called with each result.
        child: Command line of the process.
    """
    left = {check.name: check for check in checks_of(group) if not only or check.name in only}

    def take(check: Check, found: Found, seconds: float) -> None:
        left.pop(check.name, None)
        note(check.result(group, found, seconds=seconds))

    for _ in range(_MOST_DEATHS):
        if not left:
            return
        ended = _run(group, options, left, take, timeout_s=timeout_s, child=child)
        if ended.how:
            check = left.get(ended.running, START)
            take(check, Found(False, ended.how), ended.seconds)
            if check is START:  # another process would probably fail as well
                break
    for check in list(left.values()):
        take(check, Found(None, "not tested: the process ended before it"), 0.0)


def _run(
    group: str,
    options: Mapping[str, Any],
    checks: Mapping[str, Check],
    take: Callable[[Check, Found, float], None],
    *,
    timeout_s: float,
    child: Sequence[str],
) -> _Ended:
    """Run one process until it ends or one of its checks exceeds the time limit."""
    lines, for_child = os.pipe()
    job = json.dumps({"group": group, "options": dict(options), "names": list(checks), "lines": for_child})
    with tempfile.TemporaryFile() as output, os.fdopen(lines, "rb", buffering=0) as reader:
        process = subprocess.Popen(
            [*child, job],
            env=_environment(group, options),
            pass_fds=(for_child,),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.close(for_child)
        try:
            ended = _read(reader, checks, take, timeout_s=timeout_s)
            if not ended.how:
                ended.how = _exit(process, is_done=not ended.running)
        finally:
            _kill(process)
        if ended.how:
            ended.how += _tail(output)
        return ended


def _environment(group: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of a process, without the recipe cache, since cached recipes are not compiled."""
    environ = {name: value for name, value in os.environ.items() if name != "PT_HPU_RECIPE_CACHE_CONFIG"}
    if options["device"] == "emulated":
        environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    if group == "software":
        environ.pop("PT_HPU_LAZY_MODE", None)
    return environ


def _read(
    reader: IO[bytes], checks: Mapping[str, Check], take: Callable[[Check, Found, float], None], *, timeout_s: float
) -> _Ended:
    """Read results until the process closes its pipe, or a check exceeds the time limit."""
    ended, start_s, rest = _Ended(), time.monotonic(), b""
    while True:
        left_s = start_s + timeout_s - time.monotonic()
        if left_s <= 0 or not select.select([reader], [], [], left_s)[0]:
            ended.how = f"did not end within {timeout_s:g} s"
            break
        more = reader.read(65536)
        if not more:
            break
        *whole, rest = (rest + more).split(b"\n")
        for line in map(json.loads, whole):
            start_s = time.monotonic()
            ended.running = line.get("started", "")
            if "ended" in line:
                take(checks[line["ended"]], Found(line["holds"], line["text"]), line["seconds"])
    ended.seconds = time.monotonic() - start_s
    return ended


def _exit(process: subprocess.Popen[bytes], *, is_done: bool) -> str:
    """Wait for a process that has closed its pipe; return its abnormal end in words, else an empty text."""
    try:
        code = process.wait(_EXIT_S)
    except subprocess.TimeoutExpired:
        return f"did not end within {_EXIT_S:g} s of its last check"
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return "" if is_done and not code else f"the process ended with exit code {code}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children, which may have outlived it."""
    kill_session(process.pid)
    process.wait()


def _tail(output: IO[bytes]) -> str:
    """Return the last lines of a process's output."""
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - 4096))
    lines = [line.strip() for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    return f"; it printed last: {' | '.join(lines[-_TAIL_LINES:])}" if lines else ""
