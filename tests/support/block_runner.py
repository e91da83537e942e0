"""Runs Python code and ``trencadis`` commands in forks of a process that has imported what is slow to import.

Each has a process of its own, with its own folder, environment and streams, as if it had been started alone::

    block ─▶ BlockRunner.run ───────────┐ asks, and hands its streams over
    shell ─▶ trencadis ─▶ CLIENT ───────┴──▶ SERVER ─ fork ─▶ waits for ─ fork ─▶ runs
                                        ◀────────────────── exit status
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import attrs

__all__ = ["CLIENT", "BlockRunner", "Ran"]

TIMEOUT_S = 600.0

SERVER = """
import json, os, signal, socket, sys, traceback, types
from trencadis_torch.environment import set_environment
set_environment(os.environ, sys.modules)
import openai, torch._dynamo, transformers, trencadis, trencadis.cli, trencadis.client.llm, trencadis_torch.backend
import trencadis.engine.build, trencadis.client.factory, trencadis_plugins.sampling.standard
from importlib.metadata import entry_points
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from trencadis.cli import generate_command
from trencadis_server.commands import serve as serve_command
for plugin in entry_points(group="trencadis"):
    plugin.load()

def run(asked):
    if asked["argv"] is not None:
        if asked["argv"][:1] == ["serve"]:  # flags and configuration are checked; the server of the pages runs already
            serve_command.run = lambda *_: 0
        sys.argv = ["trencadis", *asked["argv"]]
        return trencadis.cli.main(asked["argv"])
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__builtins__ = __builtins__
    exec(compile(asked["text"], "<block>", "exec"), module.__dict__)

def child(asked, streams):
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    try:
        status = run(asked) or 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(64)
print("ready", flush=True)
sys.path.insert(0, "")
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    connection, _ = listener.accept()
    if os.fork():
        connection.close()
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    listener.close()
    data, streams, _, _ = socket.recv_fds(connection, 8, 3)
    length = int.from_bytes(data, "little")
    data = b""
    while len(data) < length:
        data += connection.recv(length - len(data))
    worker = os.fork()
    if not worker:
        connection.close()
        child(json.loads(data), streams)
    connection.sendall(str(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])).encode())
    os._exit(0)
"""
"""Is told where to listen."""

CLIENT = """
import json, os, socket, sys
asked = {"argv": sys.argv[2:], "text": "", "folder": os.getcwd(), "environment": dict(os.environ)}
body = json.dumps(asked).encode()
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    socket.send_fds(connection, [len(body).to_bytes(8, "little")], [0, 1, 2])
    connection.sendall(body)
    sys.exit(int(connection.recv(16)) & 255)
"""
"""Is told where the server listens, and what follows ``trencadis``; needs nothing but the standard library."""


@attrs.frozen
class Ran:
    """How a block ended, and what it wrote to its two streams."""

    returncode: int
    output: str
    errors: str


class BlockRunner:
    """The process that forks.

    Attributes:
        address: Where it listens; the process starts when it is asked for.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory()

    @property
    def address(self) -> str:
        address = f"{self._folder.name}/socket"
        if self._process is None:
            command = [sys.executable, "-W", "error::SyntaxWarning", "-c", SERVER, address]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
            assert self._process.stdout is not None, "as it was opened"
            assert self._process.stdout.readline() == "ready\n", "the process that forks does not start"
        return address

    def run(self, text: str, folder: Path) -> Ran:
        """Run code in a folder, from which it may import."""
        asked = {"argv": None, "text": text, "folder": str(folder), "environment": dict(os.environ)}
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors, open(os.devnull, "rb") as nothing:
            status = self._ask(asked, [nothing.fileno(), output.fileno(), errors.fileno()])
            output.seek(0)
            errors.seek(0)
            return Ran(status, output.read().decode(), errors.read().decode())

    def _ask(self, asked: dict[str, Any], streams: Sequence[int]) -> int:
        body = json.dumps(asked).encode()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(self.address)
            socket.send_fds(connection, [len(body).to_bytes(8, "little")], streams)
            connection.sendall(body)
            return int(connection.recv(16))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._folder.cleanup()
