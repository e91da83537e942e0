from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from trencadis.errors import ConfigError
from trencadis_kv.cluster.lock import end_cluster, running_at

PORT = 65_123
OTHER = """
import signal, sys, threading
from trencadis_kv.cluster.lock import running_at
end = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: end.set())
with running_at({port}):
    print("runs", flush=True)
    end.wait(30)
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_there_is_one_cluster_at_a_port_and_it_can_be_ended_from_elsewhere(own_folder: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", OTHER.format(port=PORT)], stdout=subprocess.PIPE)
    assert other.stdout is not None
    with other, other.stdout:
        assert other.stdout.readline() == b"runs\n"
        with pytest.raises(ConfigError, match=f"runs at port {PORT} already.*down --port {PORT}"), running_at(PORT):
            pass
        with running_at(PORT + 1):
            end_cluster(PORT, timeout_s=20)
        assert other.wait(20) == 0
    assert list(own_folder.iterdir()) == []


def test_where_none_runs_none_is_ended_also_if_one_was_killed(own_folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"no cluster of this user runs at port {PORT}"):
        end_cluster(PORT, timeout_s=1)
    other = subprocess.Popen([sys.executable, "-c", OTHER.format(port=PORT)], stdout=subprocess.PIPE)
    assert other.stdout is not None
    with other, other.stdout:
        other.stdout.readline()
        other.send_signal(signal.SIGKILL)
        other.wait(20)
    assert len(list(own_folder.iterdir())) == 1
    with pytest.raises(ConfigError, match="no cluster"):
        end_cluster(PORT, timeout_s=1)
    with running_at(PORT):
        pass


def test_file_that_is_a_link_is_not_followed(own_folder: Path) -> None:
    victim = own_folder / "victim"
    victim.write_text("mine")
    (own_folder / f"trencadis-cluster-{os.getuid()}-{PORT}").symlink_to(victim)
    with pytest.raises(ConfigError, match="cannot be used"), running_at(PORT):
        pass
    assert victim.read_text() == "mine"
