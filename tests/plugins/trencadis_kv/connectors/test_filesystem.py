"""Engines that share a directory, and what may happen to it between them."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from support.eventually import eventually
from trencadis.clock import SimulatedClock
from trencadis.errors import ConfigValueError
from trencadis.interfaces import ComponentContext
from trencadis.records import ModelFacts
from trencadis_kv.connectors.filesystem.config import FilesystemConfig
from trencadis_kv.connectors.filesystem.connector import make_filesystem
from trencadis_kv.store.inventory import examine
from trencadis_kv.store.object_directory import ObjectDirectory
from trencadis_testing import KVConnectorConformance
from trencadis_testing.connector_harness import ConnectorHarness, hashes_of
from trencadis_testing.fake_pool import FakeKVCache
from trencadis_testing.workloads import arrivals, wrong_texts


def connector(root: Path, *, model: str = "model", **options):
    """Return the connector of an engine on the directory."""
    facts = ModelFacts(
        architecture="Fake",
        dtype="float32",
        vocab_size=9,
        max_model_len=99,
        eos_token_ids=(),
        num_parameters=1,
        weights_bytes=1,
        kv_bytes_per_token=24,
        fingerprint=model,
    )
    config = FilesystemConfig(path=str(root), **{"min_free_ratio": 0.0, **options})
    return make_filesystem(config, ComponentContext(clock=SimulatedClock(), seed=0, model=facts))


class TestFilesystem(KVConnectorConformance):
    has_threads = True

    @pytest.fixture(autouse=True)
    def _home(self, tmp_path):
        self.home, self.num_made = tmp_path, 0

    def make(self):
        self.num_made += 1
        return connector(self.home / str(self.num_made))

    def lose(self, pair):
        shutil.rmtree(self.home)


@pytest.fixture
def harnesses(tmp_path):
    """Makes engines on one directory."""
    pairs = []

    def make(**options) -> ConnectorHarness:
        pairs.append(connector(tmp_path / "store", **options))
        worker = pairs[-1].worker
        return ConnectorHarness(
            pairs[-1],
            block_size=4,
            cache=lambda arrays: FakeKVCache(arrays, block_size=4),
            settle=lambda: worker.wait_idle(60.0),
        )

    yield make
    for pair in pairs:
        pair.scheduler.close()
        pair.worker.close()


HASHES = hashes_of(range(3))
TARGETS = [9, 10, 11]


def file_of(root: Path, block: int) -> Path:
    (file,) = root.rglob(HASHES[block].hex())
    return file


def failures(harness: ConnectorHarness) -> str:
    lines = harness.pair.scheduler.metrics().splitlines()
    return "\n".join(line for line in lines if line.startswith("trencadis_kv_transfer_failures_total"))


def test_second_engine_loads_what_the_first_one_saved(harnesses):
    saved = harnesses().save([1, 2, 3], HASHES)
    other = harnesses()
    found = other.lookup(HASHES)
    assert found.num_tokens == 12
    assert other.load(found.transfer_id, TARGETS, HASHES) == ""
    assert other.contents(TARGETS) == saved


def test_engine_with_another_model_or_namespace_finds_nothing(harnesses):
    harnesses().save([1, 2, 3], HASHES)
    assert harnesses(model="fine-tuned").lookup(HASHES).num_tokens == 0
    assert harnesses(namespace="tenant").lookup(HASHES).num_tokens == 0
    assert harnesses().lookup(HASHES).num_tokens == 12


def truncate(root: Path) -> None:
    file = file_of(root, 1)
    file.write_bytes(file.read_bytes()[:-7])


def lose_all_but_the_name(root: Path) -> None:
    file_of(root, 1).write_bytes(b"")


def lengthen(root: Path) -> None:
    file = file_of(root, 1)
    file.write_bytes(file.read_bytes() + b"more")


def flip(root: Path, place: int) -> None:
    file = file_of(root, 1)
    data = bytearray(file.read_bytes())
    data[place] ^= 4
    file.write_bytes(data)


def swap(root: Path) -> None:
    first, second = file_of(root, 1), file_of(root, 2)
    first.rename(root / "aside")
    second.rename(first)
    (root / "aside").rename(second)


DAMAGES = {
    "truncated": (truncate, "corrupt"),
    "empty": (lose_all_but_the_name, "corrupt"),
    "longer": (lengthen, "evicted"),
    "magic": (lambda root: flip(root, 0), "corrupt"),
    "version": (lambda root: flip(root, 4), "incompatible"),
    "block hash": (lambda root: flip(root, 60), "corrupt"),
    "checksum": (lambda root: flip(root, 90), "corrupt"),
    "payload": (lambda root: flip(root, 128), "corrupt"),
    "last byte": (lambda root: flip(root, -1), "corrupt"),
    "swapped": (swap, "corrupt"),
    "gone": (lambda root: file_of(root, 1).unlink(), "evicted"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_object_ends_a_load_behind_the_whole_blocks_before_it(harnesses, tmp_path, name):
    damage, cause = DAMAGES[name]
    saved = harnesses().save([1, 2, 3], HASHES)
    harness = harnesses()
    found = harness.lookup(HASHES)
    damage(tmp_path / "store")
    before = harness.contents(TARGETS)
    assert harness.load(found.transfer_id, TARGETS, HASHES) == cause
    assert harness.num_valid_tokens == 4
    assert harness.contents(TARGETS) == [saved[0], *before[1:]]
    assert f'cause="{cause}"' in failures(harness)


@pytest.mark.parametrize("name", [name for name, (_, cause) in DAMAGES.items() if cause == "corrupt"])
def test_broken_object_is_deleted_and_saved_anew(harnesses, tmp_path, name):
    harnesses().save([1, 2, 3], HASHES)
    harness = harnesses()
    found = harness.lookup(HASHES)
    DAMAGES[name][0](tmp_path / "store")
    harness.load(found.transfer_id, TARGETS, HASHES)
    harness.step()
    assert not list((tmp_path / "store").rglob(HASHES[1].hex()))
    saved = harness.save([1, 2, 3], HASHES)
    again = harnesses()
    assert again.load(again.lookup(HASHES).transfer_id, TARGETS, HASHES) == ""
    assert again.contents(TARGETS) == saved


def test_engines_give_the_same_texts_over_damaged_objects(tmp_path):
    suite = TestFilesystem()
    suite.make = lambda: connector(tmp_path / "store")
    todo = arrivals(4, num_requests=12)
    noise = random.Random(1)
    with suite.engine(prefix_caching=False) as first:
        assert wrong_texts(first.serve(todo), todo) == []
    files = [file for file in (tmp_path / "store").rglob("*") if file.is_file() and len(file.name) == 64]
    assert len(files) > 10
    for file in noise.sample(files, len(files) // 2):
        data = bytearray(file.read_bytes())
        data[noise.randrange(len(data))] ^= 1 << noise.randrange(8)
        file.write_bytes(data[: noise.choice([len(data), len(data), noise.randrange(len(data))])])
    with suite.engine(prefix_caching=False) as second:
        served = second.serve(todo)
    assert wrong_texts(served, todo) == []
    assert sum(end.num_cached_tokens for end in served.ends.values()) > 0
    suite.teardown_method()


def test_what_cannot_be_used_is_said_at_start_up_and_nothing_is_served_from_it(harnesses, tmp_path, caplog):
    (tmp_path / "store").write_text("a file")
    harness = harnesses()
    assert str(tmp_path / "store") in caplog.text
    assert "File exists" in caplog.text
    harness.save([1], HASHES[:1])
    assert harness.lookup(HASHES).num_tokens == 0


def test_required_directory_that_cannot_be_used_is_a_configuration_error(harnesses, tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o777)
    with pytest.raises(ConfigValueError, match="every user may write"):
        harnesses(required=True)


def test_directory_that_only_serves_is_not_written_to(harnesses, tmp_path):
    writer = harnesses()
    writer.save([1, 2, 3], HASHES)
    writer.pair.scheduler.close()
    writer.pair.worker.close()  # its sweep, on a thread of its own, writes too
    before = sorted((tmp_path / "store").rglob("*"))
    harness = harnesses(saves=False)
    assert harness.lookup(HASHES).num_tokens == 12
    harness.save([5], hashes_of([77]))
    assert sorted((tmp_path / "store").rglob("*")) == before


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB in place of the store's directory."""
    home = tmp_path / "store"
    home.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(home)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small file system")
    yield home
    subprocess.run(["umount", "--lazy", str(home)], capture_output=True, check=False)


def test_read_only_disk_is_said_and_serves_engines_that_do_not_save(harnesses, small_disk, caplog):
    saved = harnesses().save([1, 2, 3], HASHES)
    remount = ["mount", "-o", "remount,ro", str(small_disk)]  # refused while the sweep writes
    eventually(lambda: subprocess.run(remount, capture_output=True, check=False).returncode == 0)
    harness = harnesses()
    assert "Read-only file system (EROFS)" in caplog.text
    assert harness.lookup(HASHES).num_tokens == 0
    with pytest.raises(ConfigValueError, match="Read-only file system"):
        harnesses(required=True)
    harness = harnesses(saves=False, required=True)
    assert harness.load(harness.lookup(HASHES).transfer_id, TARGETS, HASHES) == ""
    assert harness.contents(TARGETS) == saved


def test_full_disk_costs_saves_and_nothing_else(harnesses, small_disk, caplog):
    saved = harnesses().save([1, 2, 3], HASHES)
    (small_disk / "somebody's").write_bytes(bytes(os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize))
    harness = harnesses()
    harness.save([4, 5], hashes_of([50, 51]))
    assert harness.load(harness.lookup(HASHES).transfer_id, TARGETS, HASHES) == ""
    assert harness.contents(TARGETS) == saved
    assert "No space left on device (ENOSPC). Free space or raise the quota" in caplog.text
    assert harness.lookup(hashes_of([50, 51])).num_tokens == 0
    assert [finding for finding in examine(ObjectDirectory(small_disk)) if finding.cause] == []
    (small_disk / "somebody's").unlink()
    harness.save([6], hashes_of([60]))
    assert harnesses().lookup(hashes_of([60])).num_tokens == 4


def test_objects_of_a_killed_engine_are_whole(tmp_path):
    """An engine that is killed while it saves: the next one finds a leading run, and all of it verifies."""
    root = tmp_path / "store"
    context = multiprocessing.get_context("fork")
    for _ in range(3):
        saving = context.Event()
        child = context.Process(target=save_for_ever, args=(root, saving))
        child.start()
        assert saving.wait(30)
        os.kill(child.pid, signal.SIGKILL)
        child.join(30)
        findings = list(examine(ObjectDirectory(root)))
        assert findings
        assert [finding for finding in findings if finding.cause] == []


def save_for_ever(root: Path, saving) -> None:
    pair = connector(root)
    harness = ConnectorHarness(
        pair,
        block_size=4,
        cache=lambda arrays: FakeKVCache(arrays, block_size=4),
        settle=lambda: pair.worker.wait_idle(60.0),
    )
    for number in itertools.count(0, 8):
        harness.save(list(range(8)), hashes_of(range(number, number + 8)))
        saving.set()


def test_path_may_begin_with_a_tilde(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    pair = connector(Path("~/pool"))
    harness = ConnectorHarness(
        pair,
        block_size=4,
        cache=lambda arrays: FakeKVCache(arrays, block_size=4),
        settle=lambda: pair.worker.wait_idle(60.0),
    )
    harness.save([1], HASHES[:1])
    assert list((tmp_path / "pool").rglob(HASHES[0].hex()))
    pair.scheduler.close()
    pair.worker.close()
