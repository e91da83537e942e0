from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from trencadis_remote.process.messages import StartMessage
from trencadis_remote.process.process import LENGTH
from trencadis_remote.process.wire import encode


def test_without_a_parent_that_speaks_it_ends_at_once_and_says_nothing() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "trencadis_remote.process"],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=30,
    )
    assert (run.returncode, run.stdout, run.stderr) == (1, b"", b"")


def test_it_ends_with_the_parent_and_removes_the_directory_of_the_socket(tmp_path: Path) -> None:
    directory = tmp_path / "line"
    directory.mkdir()
    start = StartMessage(
        address=f"ipc://{directory}/engine",
        tables={},
        sources={},
        log_levels=("critical", "critical"),
        python_path=None,
    )
    data = encode(start)
    run = subprocess.run(
        [sys.executable, "-m", "trencadis_remote.process"],
        check=False,
        input=LENGTH.pack(len(data)) + data,  # and then the pipe is closed, as a parent's end closes it
        capture_output=True,
        timeout=30,
    )
    assert run.returncode == 1
    assert run.stdout == b""
    assert not directory.exists()
