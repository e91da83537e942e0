"""The commands with the demo, started as users start them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from peers import starts
from peers.starts import GENERATE, SERVE, command_starts

BURN = "import time\nwhile time.process_time() < 0.3: pass\n"


@pytest.mark.nightly
def test_each_command_is_started_once_for_nothing_and_then_counted(tmp_path: Path) -> None:
    found = command_starts(1, {"XDG_CACHE_HOME": str(tmp_path)})
    assert [one["command"] for one in found] == [GENERATE, SERVE]
    assert all(one["cpu_s"] > 0.1 and one["wall_s"] > 0.1 for one in found)
    assert list(tmp_path.rglob("last_start.json")), "they did not run in the environment that was given"


def test_cpu_time_counts_children_that_run_and_those_that_have_ended(tmp_path: Path) -> None:
    ended = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}])\n"
    running = f"child = subprocess.Popen([sys.executable, '-c', {BURN + 'print(flush=True); input()'!r}], stdin=-1, stdout=-1)\n"
    code = f"{ended}{running}child.stdout.readline()\nprint(flush=True)\ninput()\n"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        family = starts._family(process.pid)
        assert len(family) == 2
        assert sum(map(starts._cpu_s, family)) >= 0.6 - 3 / os.sysconf("SC_CLK_TCK")


def test_a_command_that_fails_is_no_measurement(tmp_path: Path) -> None:
    broken = {"TRENCADIS_ENGINE__MAX_NUM_SEQS": "none", "XDG_CACHE_HOME": str(tmp_path)}
    with pytest.raises(RuntimeError, match=f"{GENERATE} ended with status"):
        command_starts(0, broken)
