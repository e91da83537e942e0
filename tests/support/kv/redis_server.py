"""Real Redis servers on free loopback ports, without persistence."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["RedisServer", "running_redis"]

_TRIES = 5
_READY = "Ready to accept connections"


class RedisServer:
    """A server process.

    Attributes:
        port: TCP, on 127.0.0.1; stays the same when it is started again.
        socket_path: Of its unix socket.
        folder: Where it runs.
    """

    def __init__(self, *, tls: Path | None = None, **options: str) -> None:
        self.port = 0
        self.folder = Path(tempfile.mkdtemp(prefix="redis-"))
        self.socket_path = str(self.folder / "s")
        self._tls = tls
        self._options = {"maxmemory": "256mb", "maxmemory_policy": "allkeys-lfu", **options}
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"{'rediss' if self._tls else 'redis'}://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it serves; a port that somebody took meanwhile is given up."""
        for _ in range(1 if self.port else _TRIES):
            port = self.port or _free_port()
            process = subprocess.Popen(self._command(port), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            assert process.stdout is not None
            log = []
            for line in process.stdout:
                log.append(line)
                if _READY in line:
                    self.port, self._process = port, process
                    return
            process.wait()
            process.stdout.close()
        raise AssertionError("redis-server does not start: " + "".join(log[-5:]))

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        assert self._process is not None
        self.signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)  # until it has stopped
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def run(self, *words: Any) -> Any:
        """Have it run a command, through a client that is none of ours; returns the answer."""
        import redis

        with redis.Redis(unix_socket_path=self.socket_path, password=self._options.get("requirepass")) as client:
            return client.execute_command(*words)

    def _command(self, port: int) -> list[str]:
        words = ["redis-server", "--port", str(port)]
        if self._tls is not None:
            words = ["redis-server", "--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no"]
            for name in ("cert", "key"):
                words += [f"--tls-{name}-file", str(self._tls / f"{name}.pem")]
            words += ["--tls-ca-cert-file", str(self._tls / "cert.pem")]
        words += ["--bind", "127.0.0.1", "--dir", str(self.folder)]
        words += ["--save", "", "--appendonly", "no", "--unixsocket", self.socket_path]
        for name, value in self._options.items():
            words += ["--" + name.replace("_", "-"), *value.split()]
        return words


@contextlib.contextmanager
def running_redis(**options: Any) -> Iterator[RedisServer]:
    """Have a server for as long as the block runs; skips the test where none is installed."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    if os.name != "posix":
        pytest.skip("redis-server needs a POSIX system")
    server = RedisServer(**options)
    try:
        server.start()
        yield server
    finally:
        server.close()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
