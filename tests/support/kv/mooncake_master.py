"""Real Mooncake masters on free loopback ports. Clients of a pool listen on all interfaces, for as long as a test runs."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["MooncakeMaster", "running_master"]

_LONGEST_START_S = 20.0
_NAP_S = 0.02


class MooncakeMaster:
    """A master process.

    Attributes:
        port: On 127.0.0.1; stays the same when it is started again.
    """

    def __init__(self, **options: str) -> None:
        self.port = _free_port()
        self._metrics_port = _free_port()
        self._options = {"default_kv_lease_ttl": "1000", **options}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        words = [_program(), "--rpc_address=127.0.0.1", f"--rpc_port={self.port}", "--metrics_host=127.0.0.1"]
        words += [f"--metrics_port={self._metrics_port}", *[f"--{k}={v}" for k, v in self._options.items()]]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until_s = time.monotonic() + _LONGEST_START_S
        while time.monotonic() < until_s and self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
            except OSError:
                time.sleep(_NAP_S)
            else:
                return
        raise AssertionError("mooncake_master does not start")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)  # until it has stopped
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def running_master(**options: str) -> Iterator[MooncakeMaster]:
    """Have a master for as long as the block runs; skips the test where the package is not installed."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    pytest.importorskip(
        "mooncake.store", reason='mooncake is not installed: pip install "trencadis[mooncake]"', exc_type=ImportError
    )
    master = MooncakeMaster(**options)
    try:
        master.start()
        yield master
    finally:
        master.kill()


def _program() -> str:
    beside = Path(sys.executable).with_name("mooncake_master")
    return (
        str(beside)
        if beside.exists()
        else shutil.which("mooncake_master") or pytest.skip("there is no mooncake_master")
    )


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
