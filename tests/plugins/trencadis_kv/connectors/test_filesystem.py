"""Engines that share a directory, and what may happen to it between them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.eventually import eventually
from trencadis.clock import SimulatedClock
from trencadis.errors import ConfigValueError, TransferError
from trencadis.interfaces import ComponentContext
from trencadis.records import ModelFacts
from trencadis_kv.connectors.filesystem.config import FilesystemConfig
from trencadis_kv.connectors.filesystem.connector import FilesystemStore, default_path, make_filesystem
from trencadis_kv.connectors.filesystem.disk_quota import DiskQuota
from trencadis_kv.store.inventory import examine
from trencadis_kv.store.object_directory import ObjectDirectory
from trencadis_testing import KVConnectorConformance
from trencadis_testing.connector_harness import ConnectorHarness, hashes_of
from trencadis_testing.fake_pool import FakeKVCache


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


def test_second_engine_loads_what_the_first_one_saved_unless_it_is_of_another_model_or_namespace(harnesses):
    saved = harnesses().save([1, 2, 3], HASHES)
    other = harnesses()
    found = other.lookup(HASHES)
    assert found.num_tokens == 12
    assert other.load(found.transfer_id, TARGETS, HASHES) == ""
    assert other.contents(TARGETS) == saved
    assert harnesses(model="fine-tuned").lookup(HASHES).num_tokens == 0
    assert harnesses(namespace="tenant").lookup(HASHES).num_tokens == 0


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


KEYS = [f"kv1/default/{'cd' * 16}/0.0.0-8/{number:064x}" for number in range(5)]


class Interrupting(ObjectDirectory):
    """Interrupts a store at its second object, as another thread would."""

    num_calls = 0
    store: FilesystemStore

    def holds(self, key):
        self._count()
        return super().holds(key)

    def read_into(self, key, target):
        self._count()
        return super().read_into(key, target)

    def write(self, key, pieces, *, used_ns=0):
        self._count()
        super().write(key, pieces, used_ns=used_ns)

    def remove(self, key):
        self._count()
        super().remove(key)

    def _count(self):
        self.num_calls += 1
        if self.num_calls == 2:
            self.store.interrupt()


@pytest.fixture
def stores():
    """Makes stores, and closes them at the end."""
    made = []

    def make(root: Path, *, directory: type[ObjectDirectory] = ObjectDirectory, **options):
        place = directory(root / "store")
        made.append(FilesystemStore(place, DiskQuota(place, **{"max_bytes": 0, **options})))
        return made[-1]

    yield make
    for store in made:
        store.close()
        store.close()


def views(*data: bytes) -> list[list[memoryview]]:
    return [[memoryview(one[:2]), memoryview(one[2:])] for one in data]


def test_only_a_leading_run_of_keys_counts(tmp_path, stores):
    store = stores(tmp_path)
    store.put([KEYS[0], KEYS[1], KEYS[3]], views(b"a", b"b", b"d"))
    assert store.contains(KEYS) == 2
    assert store.contains(KEYS[3:]) == 1
    assert store.contains(KEYS[2:]) == 0
    assert store.contains([]) == 0


@pytest.mark.parametrize("call", ["contains", "get", "put", "delete"])
def test_interrupted_call_ends_at_its_next_object_and_the_next_call_works(tmp_path, stores, call):
    store = stores(tmp_path, directory=Interrupting)
    stores(tmp_path).put(KEYS, views(*[b"old"] * 5))
    store._directory.store = store
    more = {
        "get": [[memoryview(bytearray(9)) for _ in KEYS]],
        "put": [views(*[b"new"] * 5)],
    }.get(call, [])
    with pytest.raises(TransferError) as caught:
        getattr(store, call)(KEYS, *more)
    assert caught.value.cause == "cancelled"
    assert store._directory.num_calls == 2
    getattr(store, call)(KEYS, *more)
    assert store._directory.num_calls == 7


def test_objects_put_together_are_evicted_from_the_last_to_the_first(tmp_path, stores):
    store = stores(tmp_path, max_bytes=5 * 64, low_water_ratio=0.5, rests=False)
    store._room._sweeper.join(60)
    store.put(KEYS, views(*[bytes(64)] * 5))
    store._directory.write(KEYS[0][:-1] + "f", views(bytes(64))[0])
    store._room.sweep()
    assert store.contains(KEYS) == 1
    assert store.contains([KEYS[0][:-1] + "f"]) == 1


def test_store_that_may_grow_no_more_keeps_fewer(tmp_path, stores):
    store = stores(tmp_path, max_bytes=40)
    store._room._next_sweep_s = float("inf")
    store._room._sweeper.join(60)
    assert store.put(KEYS, views(*[bytes(15)] * 5)) == 2
    assert store.contains(KEYS) == 2


class Filling(ObjectDirectory):
    """A disk with room for two objects."""

    def write(self, key, pieces, *, used_ns=0):
        if sum(1 for _ in self.objects()) >= 2:
            raise TransferError("no room", cause="full")
        super().write(key, pieces, used_ns=used_ns)


def test_full_disk_keeps_fewer_and_is_said_once_in_a_while(tmp_path, stores, caplog):
    store = stores(tmp_path, directory=Filling)
    assert store.put(KEYS[:4], views(*[b"x"] * 4)) == 2
    assert store.put(KEYS[2:], views(*[b"x"] * 3)) == 0
    assert caplog.text.count("no room") == 1
    store._room._next_word_s = 0.0
    store.put(KEYS[2:], views(*[b"x"] * 3))
    assert caplog.text.count("no room") == 2


def test_directory_that_must_not_be_used_is_refused_in_every_call(tmp_path, stores):
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o777)
    store = stores(tmp_path)
    calls = [
        lambda: store.contains(KEYS),
        lambda: store.get(KEYS[:1], [memoryview(bytearray(1))]),
        lambda: store.put(KEYS[:1], views(b"a")),
        lambda: store.delete(KEYS),
    ]
    for call in calls:
        with pytest.raises(TransferError, match="every user may write"):
            call()


def test_path_by_default_is_that_of_caches(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_path() == Path("/home/somebody/.cache/trencadis/kv")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_path() == Path("/home/somebody/.cache/trencadis/kv")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert default_path() == Path("/var/cache/trencadis/kv")


def test_defaults_need_no_configuration_and_trust_nobody():
    config = FilesystemConfig()
    assert (config.path, config.max_bytes, config.trust_others) == ("", 32 * 2**30, False)
