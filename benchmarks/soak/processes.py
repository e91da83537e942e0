"""A real server in processes of its own: started with a temporary directory, measured from ``/proc``, ended with all it left."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Server", "Usage", "family", "priority", "set_priority"]


@dataclass(frozen=True)
class Usage:
    """What a process holds: resident memory in MiB, what of it is the KV cache, descriptors, threads; and its id."""

    rss_mib: float
    kv_mib: float
    num_descriptors: int
    num_threads: int
    pid: int = 0

    @property
    def own_mib(self) -> float:
        """Without the KV cache, which is reserved at the start and becomes resident as requests leave prefixes in it."""
        return self.rss_mib - self.kv_mib

    def __str__(self) -> str:
        kv = f" and {self.kv_mib:.0f} MiB of KV cache" if self.kv_mib else ""
        return f"{self.own_mib:.0f} MiB{kv}, {self.num_descriptors} descriptors, {self.num_threads} threads"


_AUTOGROUP = Path("/proc/self/autogroup")


def set_priority(niceness: int) -> None:
    """Set the niceness of this process, and of its session where Linux shares cores among sessions; as far as that is permitted."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    with contextlib.suppress(OSError):
        _AUTOGROUP.write_text(str(niceness))


@contextmanager
def priority(niceness: int) -> Iterator[None]:
    """Run the block with a niceness, and restore both afterwards."""
    process, session = os.getpriority(os.PRIO_PROCESS, 0), "0"
    with contextlib.suppress(OSError):
        session = _AUTOGROUP.read_text().split()[-1]
    set_priority(niceness)
    try:
        yield
    finally:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, process)
        with contextlib.suppress(OSError):
            _AUTOGROUP.write_text(session)


def usage_of(pid: int) -> Usage | None:
    """Return what a process holds; None: it has ended."""
    try:
        kv_mib = _kv_mib(pid)
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        if not pages:  # it ends now, and the mappings may not have been all
            return None
        return Usage(
            pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
            kv_mib,
            len(os.listdir(f"/proc/{pid}/fd")),
            len(os.listdir(f"/proc/{pid}/task")),
            pid,
        )
    except OSError:
        return None


def _kv_mib(pid: int) -> float:
    """Return the resident part of anonymous mappings of a gigabyte and more: with the demo model only the KV cache has one."""
    found, is_kv = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            begin, _, end = first.partition("-")
            is_kv = len(rest) == 4 and int(end, 16) - int(begin, 16) >= 2**30
        elif is_kv and first == "Rss:":
            found += int(rest[0])
    return found / 1024


def family(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that they have started."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *family(child)]
    return found


def command_of(pid: int) -> str:
    """Return a process's command line; empty: it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\x00", b" ").decode()
    return ""


class Server:
    """``trencadis serve`` with the demo model, on free ports of the loopback interface.

    Args:
        flags: More flags.

    Attributes:
        port: Where it listens.
        admin_port: Of its administration pages.
        lines: What it has logged.
    """

    def __init__(self, *flags: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hostile-"))
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        self.admin_port = _free_port()
        self.shared_before = _shared_memory()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trencadis", "serve", "--model.path", "demo", "--server.port", "0",
             "--server.admin_port", str(self.admin_port), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "TMPDIR": str(self.temporary), "HF_HUB_OFFLINE": "1"},
            cwd=self.folder,
            start_new_session=True,
        )  # fmt: skip
        self.lines: list[str] = []
        self.known: set[int] = set()
        self.port = 0
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def wait(self) -> Server:
        """Wait until it serves."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("Listening at "):
                self.port = int(line.split()[2].rpartition(":")[2].partition("/")[0])
            if line.startswith("Ready: "):
                self.temporary_before = self._left_in_temporary()
                return self
        raise RuntimeError("the server did not start: " + "".join(self.lines[-20:]))

    @property
    def pid(self) -> int:
        """Of the process that speaks HTTP."""
        return self.process.pid

    def engine_pid(self) -> int | None:
        """Return the engine's process; None: there is none now."""
        children = family(self.pid)
        self.known.update(children)
        return next((pid for pid in children if "trencadis_remote.process" in command_of(pid)), None)

    def usage(self) -> dict[str, Usage | None]:
        """Return what server and engine hold."""
        engine = self.engine_pid()
        return {"server": usage_of(self.pid), "engine": usage_of(engine) if engine else None}

    def metric(self, name: str) -> float | None:
        """Return the sum of a metric's samples; None: there is none."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, found)) if found else None

    def longest_step(self) -> tuple[float, int]:
        """Return the longest time between two commits of late while sequences ran, seconds, and the tokens of the later step."""
        return self.metric("trencadis_longest_step_seconds") or 0.0, int(
            self.metric("trencadis_longest_step_tokens") or 0
        )

    def wait_for_rest(self, seconds: float = 60.0) -> list[str]:
        """Wait until no request is inside and no block is held; returns what is still held after so long."""
        wanted = {
            "trencadis_http_requests_in_flight": 1,  # the one that asks
            "trencadis_admitted_requests": 0,
            "trencadis_admitted_waiting_tokens": 0,
            "trencadis_running_sequences": 0,
            "trencadis_waiting_sequences": 0,
            "trencadis_used_blocks": 0,
        }
        end_s = time.monotonic() + seconds
        while True:
            held = {name: self.metric(name) for name in wanted}
            wrong = [f"{name} = {value}" for name, value in held.items() if value is not None and value > wanted[name]]
            if not wrong or time.monotonic() > end_s:
                return wrong
            time.sleep(0.2)

    def close(self, *, kill: bool = False, seconds: float = 40.0) -> list[str]:
        """End it, in order or by force; returns what it left: processes, files, a wrong status."""
        self.known.update(family(self.pid))
        left: list[str] = []
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        try:
            status = self.process.wait(seconds)
            if status and not kill:
                left.append(f"exit status {status}")
        except subprocess.TimeoutExpired:
            left.append(f"the server ran on for {seconds:g} s after SIGTERM")
            self.process.kill()
            self.process.wait()
        end_s = time.monotonic() + 10
        while (alive := [pid for pid in self.known if _is_alive(pid)]) and time.monotonic() < end_s:
            time.sleep(0.05)
        left += [f"process {pid}: {command_of(pid)[:80]}" for pid in alive]
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        left += [f"in the temporary directory: {name}" for name in self._left_in_temporary()]
        left += [
            f"in /dev/shm: {name}"
            for name in sorted(_shared_memory() - self.shared_before)
            if _is_ours(name, self.known)
        ]
        self._reader.join(5)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        return left

    def troubles(self) -> list[str]:
        """Return what the log says of tracebacks and errors."""
        return [line.strip() for line in self.lines if "Traceback" in line or " ERROR " in line]

    def _left_in_temporary(self) -> list[str]:
        # Torch keeps a cache of the user there, by its name for every process of the user.
        names = {path.relative_to(self.temporary).parts[0] for path in self.temporary.rglob("*")}
        return sorted(name for name in names if not name.startswith("torchinductor_"))

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _shared_memory() -> set[str]:
    with contextlib.suppress(OSError):
        return set(os.listdir("/dev/shm"))
    return set()


def _is_ours(name: str, pids: set[int]) -> bool:
    """Return whether a name in /dev/shm has one of these process ids in it: other engines of this machine have theirs there."""
    return bool(pids & set(map(int, re.findall(r"\d+", name))))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
