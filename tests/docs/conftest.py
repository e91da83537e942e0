"""What the blocks of the documentation need to run: a server with the demo model, and a folder for each page."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest

from support.block_runner import CLIENT, BlockRunner
from support.doc_blocks import STAND_INS, write_files

LOADING_S = 300


@attrs.frozen
class Server:
    """A running `trencadis serve`: where it listens, in place of the ports that the pages speak of, and what it prints."""

    port: int
    admin_port: int
    output: Path

    def printed(self) -> str:
        """Return its standard output, without the line of the administration port, which the pages' command leaves closed."""
        lines = self.output.read_text(encoding="utf-8").splitlines(keepends=True)
        return "".join(line for line in lines if f":{self.admin_port}/" not in line)

    def at_its_ports(self, text: str) -> str:
        """Return a block with this server's addresses."""
        return text.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}").replace(
            "127.0.0.1:8001", f"127.0.0.1:{self.admin_port}"
        )


@pytest.fixture(scope="session")
def doc_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server that the pages talk to: the demo model, no keys."""
    log = tmp_path_factory.mktemp("server") / "log.txt"
    server = Server(port=_free_port(), admin_port=_free_port(), output=log.with_name("output.txt"))
    command = [sys.executable, "-m", "trencadis", "serve", "--model.path", "demo"]
    command += ["--server.port", str(server.port), "--server.admin-port", str(server.admin_port)]
    with log.open("w") as errors, server.output.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=errors, cwd=log.parent)
    try:
        ready = f"http://127.0.0.1:{server.port}/ready"
        waiting = [
            "curl",
            "-sS",
            "--fail",
            "--retry",
            str(LOADING_S),
            "--retry-delay",
            "1",
            "--retry-all-errors",
            ready,
        ]
        result = subprocess.run(waiting, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"{result.stderr[-500:]}\n{log.read_text()[-3000:]}"
        yield server
    finally:
        process.terminate()
        process.wait(LOADING_S)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def python_blocks() -> Iterator[BlockRunner]:
    """Runs blocks of Python, each as in a process of its own."""
    with BlockRunner() as runner:
        yield runner


@pytest.fixture(scope="session")
def page_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of a page: the files that the page shows are there, and what its earlier blocks wrote."""
    folders: dict[str, Path] = {}

    def folder(page: str) -> Path:
        if page not in folders:
            folders[page] = tmp_path_factory.mktemp("page")
            write_files(page, folders[page])
        return folders[page]

    return folder


@pytest.fixture(scope="session")
def shell(
    tmp_path_factory: pytest.TempPathFactory, python_blocks: BlockRunner
) -> Callable[[str, Path], subprocess.CompletedProcess[str]]:
    """Runs a block by bash in a folder; a failing command ends it. Commands of ``trencadis`` run in forks."""
    tools = tmp_path_factory.mktemp("tools")
    for name, body in STAND_INS.items():
        (tools / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tools / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "CLIENT": CLIENT,
        "FORKS_AT": python_blocks.address,
        "REAL_CURL": shutil.which("curl") or "curl",
        # What looks at the port, such as doctor, must not depend on who else listens on this machine.
        "TRENCADIS_SERVER__PORT": str(_free_port()),
    }

    def run(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"enable -n kill\n{text}"],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
            env=environment,
            timeout=600,
        )

    return run
