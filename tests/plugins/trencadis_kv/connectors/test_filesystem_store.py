"""The store of the connector ``filesystem``, call by call."""

from __future__ import annotations

from pathlib import Path

import pytest

from trencadis.errors import TransferError
from trencadis_kv.connectors.filesystem.config import FilesystemConfig
from trencadis_kv.connectors.filesystem.connector import FilesystemStore, default_path
from trencadis_kv.connectors.filesystem.disk_quota import DiskQuota
from trencadis_kv.store.object_directory import ObjectDirectory

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


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_bytes", -1),
        ("low_water_ratio", 1.1),
        ("low_water_ratio", -0.1),
        ("min_free_ratio", 1.0),
        ("namespace", ".."),
    ],
)
def test_option_out_of_range_is_refused(option, value):
    with pytest.raises(ValueError, match=option):
        FilesystemConfig(**{option: value})
